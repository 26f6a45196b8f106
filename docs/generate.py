"""Writes what the documentation derives from the code: the lifecycle's picture and table, the settings.

python docs/generate.py [--check]
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from app.lifecycle import FINAL, INITIAL, STEPS, State  # noqa: E402
from app.settings import Settings  # noqa: E402


def picture() -> str:
    """The lifecycle as a Mermaid state diagram; a step that several states share is drawn from each."""
    lines = ["```mermaid", "stateDiagram-v2"]
    lines += [f"    [*] --> {state}: enqueue" for state in sorted(INITIAL)]
    labels: dict[tuple[State, State], list[str]] = {}
    for step in STEPS.values():
        if step.name in ("cancel", "expire"):
            continue  # from every live, and every pending, state: said below the picture
        for source in sorted(step.sources):
            for target in sorted(step.targets):
                labels.setdefault((source, target), []).append(step.name.replace("_", " "))
    lines += [f"    {source} --> {target}: {', '.join(names)}" for (source, target), names in labels.items()]
    lines += [f"    {state} --> [*]" for state in sorted(FINAL)]
    lines += ["```", "", "Any job that is not final can be cancelled; a pending one expires if it has a `start_by`."]
    return "\n".join(lines)


def lifecycle_page() -> str:
    """Every step in a table."""
    rows = [
        f"| {step.name} | {', '.join(sorted(step.sources))} | {step.target}"
        + (f"; {step.exhausted} when attempts are used up" if step.exhausted else "")
        + f" | {step.attempt} | {', '.join(sorted(step.actors))} | {step.effect} |"
        for step in STEPS.values()
    ]
    return "\n".join(
        [
            "# The lifecycle",
            "",
            "Generated from `app/lifecycle.py`; do not edit.",
            "",
            picture(),
            "",
            "| Step | From | To | Attempt | Who | Effect |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
            "A worker's steps are guarded by the lease number, which only a claim raises. Attempts go back on snooze,",
            "release, resume and redrive, so they guard nothing.",
            "",
        ]
    )


def settings_page() -> str:
    """Every setting in a table."""
    rows = []
    for name, field in Settings.model_fields.items():
        rows.append(f"| `TOWPATH_{name.upper()}` | `{field.default}` | {field.description} |")
    head = ["# Settings", "", "Generated from `app/settings.py`; do not edit. Read from the environment.", ""]
    return "\n".join([*head, "| Variable | Default | Meaning |", "|---|---|---|", *rows, ""])


def readme() -> str:
    """The README with its picture."""
    text = (ROOT / "README.md").read_text()
    begin, end = "<!-- lifecycle:begin -->\n", "<!-- lifecycle:end -->"
    before, after = text[: text.index(begin) + len(begin)], text[text.index(end) :]
    return f"{before}{picture()}\n{after}"


def main(*, check: bool) -> int:
    """Write the pages, or count those that are not current."""
    pages = {
        "README.md": readme(),
        "docs/reference/lifecycle.md": lifecycle_page(),
        "docs/reference/settings.md": settings_page(),
    }
    stale = [name for name, text in pages.items() if not (ROOT / name).exists() or (ROOT / name).read_text() != text]
    for name in stale:
        if check:
            print(f"{name} is not current: run make docs")
        else:
            (ROOT / name).write_text(pages[name])
    return len(stale) if check else 0


if __name__ == "__main__":
    sys.exit(main(check="--check" in sys.argv))
