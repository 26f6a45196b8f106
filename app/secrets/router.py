"""The routes of secrets."""

from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Depends, Path, Request, Response

from app.database.engine import Database
from app.http.dependencies import json_body, json_response
from app.http.openapi import documented
from app.http.pagination import PageCursor, PageLimit
from app.secrets import operations
from app.secrets.encryption import Vault
from app.secrets.schemas import NewSecret, Secret, SecretPage


@dataclass(frozen=True, slots=True)
class Secrets:
    """What the routes of secrets use."""

    database: Database
    vault: Vault


def _of(request: Request) -> Secrets:
    secrets: Secrets = request.state.secrets
    return secrets


router = APIRouter(prefix="/v1/secrets", tags=["secrets"])
Name = Annotated[str, Path(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}$", description="The secret's name.")]


@router.get("", **documented({200: SecretPage}, summary="List secrets by name, without their values."))
async def list_secrets(request: Request, cursor: PageCursor = None, limit: PageLimit = 50) -> Response:
    """No call gives a value back."""
    secrets, next_cursor = await operations.list_secrets(_of(request).database, cursor, limit)
    return json_response(SecretPage(secrets=secrets, next_cursor=next_cursor))


@router.get("/{name}", **documented({200: Secret}, "unknown-secret", summary="See that a secret is there."))
async def get_secret(request: Request, name: Name) -> Response:
    """And since when. Not its value."""
    return json_response(await operations.get_secret(_of(request).database, name))


@router.put(
    "/{name}",
    **documented({200: Secret, 201: Secret}, "secret-unreadable", body=NewSecret, summary="Set a secret's value."),
)
async def put_secret(
    request: Request, name: Name, new: Annotated[NewSecret, Depends(json_body(NewSecret))]
) -> Response:
    """With `keep_previous_seconds`, what was signed with the value before still counts for so long."""
    secrets = _of(request)
    secret, is_new = await operations.put_secret(secrets.database, secrets.vault, name, new)
    return json_response(secret, 201 if is_new else 200)


@router.delete("/{name}", **documented({204: None}, "unknown-secret", "secret-in-use", summary="Remove a secret."))
async def delete_secret(request: Request, name: Name) -> Response:
    """Open waits that need it refuse every callback from then on."""
    await operations.delete_secret(_of(request).database, name)
    return Response(status_code=204)
