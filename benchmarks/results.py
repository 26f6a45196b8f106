"""Figures of a run: every round, medians, ratios, and what they are held against."""

import statistics
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from benchmarks.curves import Curve

Rounds = dict[str, list[float]]


@dataclass
class Results:
    """Named figures, one value a round, and what must hold."""

    rounds: Rounds = field(default_factory=lambda: defaultdict(list))
    wrong: list[str] = field(default_factory=list)
    """Lost, doubled or refused: there must be none."""
    curves: dict[str, Curve] = field(default_factory=dict)

    def add(self, name: str, value: float) -> None:
        """One round's value."""
        self.rounds[name].append(value)

    def check(self, holds: bool, what: str) -> None:
        """Note what went wrong."""
        if not holds:
            self.wrong.append(what)

    def median(self, name: str) -> float:
        """Of all rounds; raises KeyError when it was not measured."""
        if name not in self.rounds:
            raise KeyError(name)
        return statistics.median(self.rounds[name])

    def best(self, names: Callable[[str], bool]) -> float:
        """The largest median of the figures whose names fit; raises KeyError when there is none."""
        found = [self.median(name) for name in self.rounds if names(name)]
        if not found:
            raise KeyError
        return max(found)

    def smallest(self, names: Callable[[str], bool]) -> float:
        """The smallest median of the figures whose names fit; raises KeyError when there is none."""
        found = [self.median(name) for name in self.rounds if names(name)]
        if not found:
            raise KeyError
        return min(found)


Figure = Callable[[Results], float]


def _of(name: str) -> Figure:
    return lambda results: results.median(name)


def _best(what: str, peer: str = "") -> Figure:
    return lambda results: results.best(lambda name: name.startswith(f"{what}: {peer}"))


def _smallest(what: str) -> Figure:
    return lambda results: results.smallest(lambda name: name.startswith(f"{what}: "))


@dataclass(frozen=True)
class Target:
    """A ratio of two medians of one run, or one of them, and what it is to be."""

    id: str
    what: str
    goal: float
    figure: Figure
    over: Figure = field(default=lambda _: 1.0)
    at_most: bool = False

    def reached(self, results: Results) -> float:
        """The ratio; raises KeyError when a part of it was not measured."""
        return self.figure(results) / self.over(results)

    def verdict(self, ratio: float) -> str:
        """Met, or by how much it is missed."""
        if ratio <= self.goal if self.at_most else ratio >= self.goal:
            return "met"
        return f"short by {abs(ratio / self.goal - 1):.0%}" if self.goal else f"{ratio:.2g} too many"


_SINGLE, _MANY, _LOTS = "drain/s: towpath 64 × 1", "drain/s: towpath 16 × 10", "drain/s: towpath 8 × 100"
_ONE, _TWO = "single/s: towpath 1 process, 256", "single/s: towpath 2 processes, 256"
_PEERS = "peer drain/s"

TARGETS = (
    Target("T1", "enqueue / bare echo", 0.6, _of("single/s: towpath"), _of("single/s: echo")),
    Target("T1", "enqueue / textbook", 12, _of("single/s: towpath"), _of("single/s: textbook")),
    Target("T1", "enqueue / best peer's, 50 callers", 6, _of("single/s: towpath"), _best("peer single/s")),
    Target("T2", "batches of 1,000 / best peer's bulk", 1.5, _of("bulk/s: towpath"), _best("peer bulk/s")),
    Target("T3", "drain 16 × 10 / graphile-worker", 1.2, _of(_MANY), _best(_PEERS, "graphile")),
    Target("T3", "drain 8 × 100 / graphile-worker", 2, _of(_LOTS), _best(_PEERS, "graphile")),
    Target("T3", "drain 16 × 10 / AWA", 4, _of(_MANY), _best(_PEERS, "awa")),
    Target("T3", "drain 8 × 100 / AWA", 8, _of(_LOTS), _best(_PEERS, "awa")),
    Target("T4", "drain 64 × 1 / AWA", 1.2, _of(_SINGLE), _best(_PEERS, "awa")),
    Target("T5", "pickup p50 / best peer's", 0.8, _of("pickup p50 ms: towpath"), _smallest("peer pickup p50 ms"), True),
    Target("T5", "pickup p99 / best peer's", 0.7, _of("pickup p99 ms: towpath"), _smallest("peer pickup p99 ms"), True),
    Target("T6", "memory with 10,000 polls, MB", 200, _of("idle polls: memory MB"), at_most=True),
    Target(
        "T6",
        "pickup p99, 10,000 / 64 polls",
        1.5,
        _of("idle polls: pickup p99 ms, all"),
        _of("idle polls: pickup p99 ms, 64"),
        True,
    ),
    Target(
        "T6",
        "heartbeat p99, 10,000 / 64 polls",
        1.5,
        _of("idle polls: heartbeat p99 ms, all"),
        _of("idle polls: heartbeat p99 ms, 64"),
        True,
    ),
    Target("T6", "transactions/s while all are idle", 0, _of("idle polls: transactions/s, all"), at_most=True),
    Target(
        "T7",
        "last minute with a snapshot / without",
        0.85,
        _of("last minute/s: snapshot held"),
        _of("last minute/s: no snapshot"),
    ),
    Target("T8", "claim p50, deepest / first", 1.2, _of("depth: deepest p50 ms"), _of("depth: first p50 ms"), True),
    Target("T9", "WAL a job / AWA's", 1, _of("WAL B/job: towpath"), _of("peer WAL B/job: awa"), True),
    Target("T9", "commits a job", 0.05, _of("commits/job: towpath"), at_most=True),
    Target("T10", "two processes / one, 256 connections", 1, _of(_TWO), _of(_ONE)),
    Target(
        "T11",
        "enqueue p99, while old jobs go / before",
        1.5,
        _of("retention: enqueue p99 ms, meanwhile"),
        _of("retention: enqueue p99 ms, before"),
        True,
    ),
    Target(
        "T11",
        "pickup p99, while old jobs go / before",
        1.5,
        _of("retention: pickup p99 ms, meanwhile"),
        _of("retention: pickup p99 ms, before"),
        True,
    ),
    Target("T12", "10,000 heartbeats in 10 s, cores", 0.1, _of("heartbeats: share of a core"), at_most=True),
)


def measured(results: Results) -> list[tuple[Target, float]]:
    """The targets of this run, and what was reached."""
    found = []
    for target in TARGETS:
        with suppress(KeyError):
            found.append((target, target.reached(results)))
    return found


def report(results: Results) -> str:
    """A table of figures, and one of targets."""
    lines = ["| figure | median | rounds |", "|---|---|---|"]
    for name, values in sorted(results.rounds.items()):
        shown = ", ".join(_short(value) for value in values)
        lines.append(f"| {name} | {_short(statistics.median(values))} | {shown} |")
    lines += ["", "| target | what | goal | here | |", "|---|---|---|---|---|"]
    for target, ratio in measured(results):
        sign = "≤" if target.at_most else "≥"
        verdict = target.verdict(ratio)
        lines.append(f"| {target.id} | {target.what} | {sign} {target.goal:g} | {ratio:.2f} | {verdict} |")
    wrong = "\n".join(f"WRONG: {each}" for each in results.wrong) or "nothing lost, doubled or refused"
    return "\n".join(lines) + f"\n\nT13: {wrong}\n"


def _short(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def stored(results: Results, conditions: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a run."""
    return {
        "conditions": conditions,
        "rounds": dict(results.rounds),
        "medians": {name: results.median(name) for name in results.rounds},
        "curves": {name: curve.series for name, curve in results.curves.items()},
        "targets": [
            {"id": each.id, "what": each.what, "goal": each.goal, "here": ratio, "verdict": each.verdict(ratio)}
            for each, ratio in measured(results)
        ],
        "wrong": results.wrong,
    }
