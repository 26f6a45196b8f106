"""The pages of the documentation, and the examples in them that are run.

A fenced block is an example when the line before it is one of these comments:

    <!-- run -->               run it; every call succeeds
    <!-- run: 409 -->          run it; the last call is refused with this status
    <!-- run: rolled back -->  run it in a transaction that is taken back (SQL)
    <!-- answer -->            what the last call of the example before was answered, abbreviated with `…`
"""

import json
import re
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md")])
HOW_TOS = sorted(ROOT.glob("docs/how-to/*.md"))
ADDRESS = "http://127.0.0.1:8080"

_MARKED = re.compile(r"^<!-- (run|answer)(?:: ([^-]+))? -->\n```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}:,…]|[^\s"\[\]{}:,…]+')
MORE = "…"


@dataclass
class Example:
    """A block that is run, and what it says about the answer to its last call."""

    language: str
    text: str
    option: str | None
    answer: str | None = None

    @property
    def refused_with(self) -> str:
        """The status that the last call is refused with; empty when it succeeds."""
        return self.option if self.option and self.option.isdigit() else ""


def name(page: Path) -> str:
    """A page's path in the repository."""
    return str(page.relative_to(ROOT))


def examples(page: Path) -> list[Example]:
    """The examples of a page, in order."""
    found: list[Example] = []
    for kind, option, language, text in _MARKED.findall(page.read_text()):
        if kind == "run":
            found.append(Example(language, text, option or None))
        else:
            assert found, f"{name(page)} has an answer before its first example"
            assert found[-1].answer is None, f"{name(page)} has two answers to one example"
            found[-1].answer = text
    return found


def abbreviated(text: str) -> Any:
    """The JSON of an answer. `…` stands for anything: a value, a part of a text, more members, more items."""
    parts: list[str] = []
    brackets: list[str] = []
    for token in _TOKEN.findall(text):
        if token in "[{":
            brackets.append(token)
        elif token in "]}":
            brackets.pop()
        elif token == MORE and parts[-1] != ":":
            token = f'"{MORE}": 0' if brackets[-1] == "{" else f'"{MORE}"'
        elif token == MORE:
            token = f'"{MORE}"'
        parts.append(token)
    return json.loads("".join(parts))


def differences(said: Any, answered: Any, at: str = "") -> list[str]:
    """Where an answer is not what the page says."""
    if isinstance(said, dict) and isinstance(answered, dict):
        missing = [f"{at}/{key}: is not there" for key in said if key != MORE and key not in answered]
        unsaid = [f"{at}/{key}: is not said" for key in answered if key not in said and MORE not in said]
        both = [differences(said[key], answered[key], f"{at}/{key}") for key in said if key in answered]
        return [*missing, *unsaid, *chain.from_iterable(both)]
    if isinstance(said, list) and isinstance(answered, list):
        more = MORE in said
        items = [item for item in said if item != MORE]
        if len(answered) < len(items) or (len(answered) > len(items) and not more):
            return [f"{at}: {len(answered)} items instead of {len(items)}"]
        return [*chain.from_iterable(differences(item, answered[n], f"{at}/{n}") for n, item in enumerate(items))]
    if isinstance(said, str) and MORE in said:
        shape = ".*".join(re.escape(part) for part in said.split(MORE))
        fits = said == MORE or (isinstance(answered, str) and re.fullmatch(shape, answered, re.DOTALL))
        return [] if fits else [f"{at}: {answered!r} is not {said!r}"]
    same = said == answered and isinstance(said, bool) == isinstance(answered, bool)
    return [] if same else [f"{at}: {answered!r} is not {said!r}"]
