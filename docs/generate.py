"""Writes the parts of the documentation that the code knows best: the lifecycle's picture and page, the settings.

`python docs/generate.py` writes them; with `--check` it writes nothing, and fails when one of them is not current.
"""

import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from app.lifecycle import (  # noqa: E402
    DEFAULT_BACKOFF,
    ERRORS_KEPT,
    FINAL,
    INITIAL,
    LIVE,
    PENDING,
    STEPS,
    State,
    Step,
)
from app.settings import Settings  # noqa: E402

MEANINGS = {
    State.SCHEDULED: "due later",
    State.AVAILABLE: "due, and free to claim",
    State.RUNNING: "held by a worker under a lease",
    State.RETRYABLE: "an attempt failed; due again later",
    State.WAITING_EXTERNAL: "parked until a callback comes",
    State.COMPLETED: "done, with its result",
    State.FAILED: "given up, with its errors; a dead letter if its queue keeps those",
    State.CANCELLED: "not wanted any more, with the reason",
}
# From so many states that their arrows would hide the others: said below the picture.
NOT_DRAWN = {"cancel": LIVE, "expire": PENDING}
BELOW = "Not drawn: `cancel`, from every state that is not final, and `expire`, for a pending job with a `start_by`."
BACKOFF_SHOWN = (1, 2, 3, 5, 8, 12, 16, 20)


def picture() -> str:
    """The lifecycle as a Mermaid state diagram, and the steps that it leaves out."""
    labels: dict[tuple[State, State], list[str]] = {}
    for step in STEPS.values():
        if step.name in NOT_DRAWN:
            assert step.sources == NOT_DRAWN[step.name]
            continue
        for source in sorted(step.sources):
            for target in sorted(step.targets):
                labels.setdefault((source, target), []).append(step.name)
    lines = ["```mermaid", "stateDiagram-v2"]
    lines += [f"    [*] --> {state}: enqueue" for state in sorted(INITIAL)]
    lines += [f"    {source} --> {target}: {', '.join(names)}" for (source, target), names in labels.items()]
    lines += [f"    {state} --> [*]" for state in sorted(FINAL)]
    return "\n".join([*lines, "```", "", BELOW])


def lifecycle_page() -> str:
    """Every state, every step, and the default backoff."""
    return f"""\
# The lifecycle

Generated from [`app/lifecycle.py`](../../app/lifecycle.py); do not edit. The service builds its statements from the
same rules, and the database's own checks are tested against them.

{picture()}

## States

| State | A job here is | Final |
|---|---|---|
{_rows(f"`{state}` | {MEANINGS[state]} | {'yes' if state in FINAL else ''}" for state in State)}

Only `redrive` leaves a final state, and never `completed`.

## Steps

A *leased* step needs the lease of the job's latest claim; with another one it changes nothing and is answered 409
`lease-lost`. The history of a job, `GET /v1/jobs/{{id}}/events`, uses these names; `claim` and `promote` leave no
event.

| Step | From | To | By | Leased | Attempts | Effect |
|---|---|---|---|---|---|---|
{_rows(_step(step) for step in STEPS.values())}

"Attempts" is what a step does to the counter: `take` adds one, `give back` subtracts it again, `reset` makes it 0.
The counter goes back, so it proves nothing. The lease number only grows, and only a claim raises it: that is what
guards a job. A job that is lost, late or timed out has used its attempt; at `max_attempts` it fails.

## Backoff

How long a job is `retryable` when its worker names no delay, unless its queue or the job itself has another policy:
{DEFAULT_BACKOFF.kind}, base {DEFAULT_BACKOFF.base_seconds:g} s, factor {DEFAULT_BACKOFF.factor:g}, \
up to {DEFAULT_BACKOFF.jitter:.0%} of jitter, never more than {_time(DEFAULT_BACKOFF.cap_seconds)}.

| After failed attempt | At least | At most |
|---|---|---|
{_rows(_backoff(attempt) for attempt in BACKOFF_SHOWN)}

The newest {ERRORS_KEPT} errors stay on the job; `errors_total` counts all.
"""


def _step(step: Step) -> str:
    targets = f"`{step.target}`" + (f", or `{step.exhausted}` when attempts are used up" if step.exhausted else "")
    sources = "every live state" if step.sources == LIVE else ", ".join(f"`{each}`" for each in sorted(step.sources))
    leased, attempts = "yes" if step.leased else "", "" if step.attempt == "keep" else step.attempt
    actors = ", ".join(sorted(step.actors))
    return f"`{step.name}` | {sources} | {targets} | {actors} | {leased} | {attempts} | {step.effect}"


def _backoff(attempt: int) -> str:
    shortest, longest = DEFAULT_BACKOFF.bounds(attempt)
    return f"{attempt} | {_time(shortest)} | {_time(longest)}"


def _time(seconds: float) -> str:
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def _rows(rows: Iterable[str]) -> str:
    return "\n".join(f"| {row} |" for row in rows)


def settings_page() -> str:
    """Every setting."""
    rows = [
        f"`TOWPATH_{name.upper()}` | {'' if field.default is None else f'`{field.default}`'} | {field.description}"
        for name, field in Settings.model_fields.items()
    ]
    return f"""\
# Settings

Generated from [`app/settings.py`](../../app/settings.py); do not edit. Read from the environment when a process starts.
What belongs to one queue is not here: see [pause and tune a queue](../how-to/pause-and-tune-a-queue.md).

| Variable | Default | Meaning |
|---|---|---|
{_rows(rows)}
"""


def readme() -> str:
    """The README with its picture."""
    text = (ROOT / "README.md").read_text()
    begin, end = "<!-- lifecycle:begin -->\n", "<!-- lifecycle:end -->"
    before, after = text[: text.index(begin) + len(begin)], text[text.index(end) :]
    return f"{before}{picture()}\n{after}"


PAGES = {
    "README.md": readme,
    "docs/reference/lifecycle.md": lifecycle_page,
    "docs/reference/settings.md": settings_page,
}


def stale_pages() -> dict[str, str]:
    """The pages that are not current, with what they should be."""
    made = {name: make() for name, make in PAGES.items()}
    return {name: text for name, text in made.items() if not _is(ROOT / name, text)}


def _is(page: Path, text: str) -> bool:
    return page.exists() and page.read_text() == text


def main(*, check: bool) -> int:
    """Write the pages, or count those that are not current."""
    stale = stale_pages()
    for name, text in stale.items():
        if check:
            print(f"{name} is not current: run `make docs`")
        else:
            (ROOT / name).write_text(text)
            print(f"wrote {name}")
    return len(stale) if check else 0


if __name__ == "__main__":
    sys.exit(main(check="--check" in sys.argv))
