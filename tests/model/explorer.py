"""Explores every state that a model can reach, breadth first, and shows the shortest way to a violation."""

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

S = TypeVar("S", bound=Hashable)


class Violation(AssertionError):
    """The model broke a rule; the steps that led there are in the message."""


class Exploration(Generic[S]):
    """All reachable states. `steps` gives the named successors of a state; `broken` the rule that a state breaks."""

    def __init__(
        self, initial: S, steps: Callable[[S], Iterable[tuple[str, S]]], broken: Callable[[S], str | None]
    ) -> None:
        self.came_from: dict[S, tuple[S, str] | None] = {initial: None}
        self.leads_to: dict[S, list[S]] = {}
        waiting = deque([initial])
        while waiting:
            state = waiting.popleft()
            rule = broken(state)
            if rule:
                raise Violation(self._told(rule, state))
            following = []
            try:
                for name, after in steps(state):
                    following.append(after)
                    if after not in self.came_from:
                        self.came_from[after] = (state, name)
                        waiting.append(after)
            except Violation as violation:
                raise Violation(self._told(str(violation), state)) from None
            self.leads_to[state] = following

    def require_way_out(self, settled: Callable[[S], bool]) -> None:
        """From every state some way leads to one that is `settled`; else Violation."""
        origins: dict[S, list[S]] = {state: [] for state in self.leads_to}
        for state, following in self.leads_to.items():
            for after in following:
                origins[after].append(state)
        reached = {state for state in self.leads_to if settled(state)}
        waiting = list(reached)
        while waiting:
            for before in origins[waiting.pop()]:
                if before not in reached:
                    reached.add(before)
                    waiting.append(before)
        stuck = next((state for state in self.leads_to if state not in reached), None)
        if stuck is not None:
            raise Violation(self._told("no way leads out of this state", stuck))

    def _told(self, rule: str, state: S) -> str:
        names = []
        at = state
        while (origin := self.came_from[at]) is not None:
            at, name = origin
            names.append(name)
        return f"{rule}\n  " + "\n  ".join(reversed(names)) + f"\n{state}"
