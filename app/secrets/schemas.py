"""Secrets on the wire: their values only ever go in."""

from typing import Annotated

from msgspec import Meta

from app.http.wire import Answer, Body, Page, Time


class NewSecret(Body, kw_only=True):
    """A secret's value, from now on. Its previous one may count for a while, until its sender has the new one."""

    value: Annotated[str, Meta(min_length=8, max_length=4096)]
    keep_previous_seconds: Annotated[float, Meta(ge=0, le=31_536_000)] = 0.0


class Secret(Answer, kw_only=True):
    """A secret without its value, which nobody can read back."""

    name: str
    previous_until: Time | None
    created_at: Time
    updated_at: Time


class SecretPage(Page, kw_only=True):
    """Secrets by name."""

    secrets: list[Secret]
