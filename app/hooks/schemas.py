"""Hooks on the wire."""

from typing import Annotated
from uuid import UUID

from msgspec import Meta

from app.callbacks.signatures import SignatureCheck
from app.http.wire import Answer, Body, Page, Time

Expression = Annotated[str, Meta(min_length=1, max_length=4000)]


class HookSettings(Body, kw_only=True):
    """What a hook takes, and how it finds the waits that a delivery answers. Expressions are CEL."""

    correlation: Annotated[
        Expression,
        Meta(description="Gives the key of a delivery: a text or a whole number.", examples=["payload.order.id"]),
    ]
    filter: Annotated[Expression | None, Meta(description="What it is false for is not for us: it is ignored.")] = None
    delivery_id: Annotated[
        Expression | None,
        Meta(
            description=(
                "Gives what a sender's repeat has in common with the first delivery. Default: `webhook-id`,"
                " `x-github-delivery`, `idempotency-key`, a CloudEvent's source and id, or else the body itself."
            )
        ),
    ] = None
    signature: Annotated[SignatureCheck | None, Meta(description="Without one, anyone who reaches it counts.")] = None
    keep_seconds: Annotated[
        float,
        Meta(ge=60, le=2_592_000, description="How long a delivery waits for its wait, and repeats are known."),
    ] = 86_400.0


class Hook(Answer, kw_only=True):
    """A hook as it is."""

    name: str
    correlation: str
    filter: str | None
    delivery_id: str | None
    signature: SignatureCheck | None
    keep_seconds: float
    created_at: Time
    updated_at: Time


class HookPage(Page, kw_only=True):
    """Hooks by name."""

    hooks: list[Hook]


class HookAnswer(Answer, kw_only=True):
    """How many waits the delivery resolved. None, and it is `kept` for one that is opened later (202).

    `ignored`: the hook's filter let it pass. A repeat (`already_applied`) resolves nothing twice.
    """

    id: UUID | None
    matched: int
    kept: bool
    ignored: bool
    already_applied: bool
