"""What callers wrote down, held against the tables, id by id: nothing may be missing, nothing done twice."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class Ledger:
    """The callers' own log of one run."""

    acknowledged: list[str] = field(default_factory=list)
    """Ids in answers to enqueues."""
    handled: list[str] = field(default_factory=list)
    """Ids that a handler was started for."""
    reported: list[str] = field(default_factory=list)
    """Ids whose completion was acknowledged."""

    def faults(self, there: Iterable[str], completed: Iterable[str], *, unheard: int = 0) -> list[str]:
        """What is wrong, given the ids in the tables and those that are completed there.

        `unheard` is how many jobs may be there, or be completed, without an answer: of the requests that were under
        way when the run was ended.
        """
        acknowledged, handled, reported = set(self.acknowledged), set(self.handled), set(self.reported)
        there, completed = set(there), set(completed)
        found = {
            "acknowledged twice": len(_repeated(self.acknowledged)),
            "acknowledged and lost": len(acknowledged - there),
            "handled twice": len(_repeated(self.handled)),
            "handled and never enqueued": len(handled - there),
            "reported and never handled": len(reported - handled),
            "reported and not completed": len(reported - completed),
            "there without an answer": max(0, len(there - acknowledged) - unheard),
            "completed without an answer": max(0, len(completed - reported) - unheard),
        }
        return [f"{count} jobs {what}" for what, count in found.items() if count]


def _repeated(ids: list[str]) -> list[str]:
    return [each for each, times in Counter(ids).items() if times > 1]
