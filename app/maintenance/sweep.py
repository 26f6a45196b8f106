"""What every sweep is: a bounded batch, run again until nothing is due, by one process at a time."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, LiteralString

from psycopg import AsyncConnection

from app.jobs.transition import statement
from app.lifecycle import Step

Run = Callable[[AsyncConnection[Any], int, list[Any]], Awaitable[int]]


@dataclass(frozen=True, slots=True)
class Sweep:
    """`run(connection, limit, excluded)` changes up to `limit` rows in the caller's transaction and counts them.

    `pick` finds the rows that it would change (the same parameters), so that a row which makes a batch fail
    can be found and left out. `next_due` gives the seconds until something is due, or nothing.

    While its batches are full it runs for this `share` of the time: one that can wait leaves the rest to live jobs. A
    batch has `most` rows at most, whatever the setting.
    """

    name: str
    run: Run
    pick: LiteralString
    interval_seconds: float
    next_due: LiteralString | None = None
    share: float = 1.0
    most: int = 1_000_000


def transition_sweep(
    step: Step, pick: LiteralString, *, interval_seconds: float, next_due: LiteralString | None = None
) -> Sweep:
    """A sweep that gives one lifecycle step to the jobs that `pick` selects and locks."""

    async def run(connection: AsyncConnection[Any], limit: int, excluded: list[Any]) -> int:
        cursor = await connection.execute(statement(step, pick), {"limit": limit, "excluded": excluded})
        return cursor.rowcount

    return Sweep(step.name, run, pick, interval_seconds, next_due)
