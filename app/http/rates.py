"""What one outsider may ask for in a minute. Counted in each process: a bound on cost, not a quota."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import UUID

from limits import RateLimitItemPerMinute
from limits.storage import MemoryStorage
from limits.strategies import FixedWindowRateLimiter

from app.errors import Kind, Refusal

_BLAMED = frozenset({Kind.MALFORMED, Kind.UNKNOWN, Kind.FORBIDDEN, Kind.TOO_LARGE, Kind.UNSUPPORTED, Kind.INVALID})


class Rates:
    """Arrivals per wait and hook, and refused requests per source: guessing is cut off, a busy sender is not."""

    def __init__(self, *, per_wait: int, per_hook: int, refused_per_source: int) -> None:
        self._limiter = FixedWindowRateLimiter(MemoryStorage())
        self._per_wait = RateLimitItemPerMinute(per_wait)
        self._per_hook = RateLimitItemPerMinute(per_hook)
        self._refused_per_source = RateLimitItemPerMinute(refused_per_source)

    def admit_to_wait(self, wait_id: UUID) -> None:
        """Count one callback. Raises Refusal: too many this minute."""
        self._admit(self._per_wait, "wait", str(wait_id))

    def admit_to_hook(self, name: str) -> None:
        """Count one delivery. Raises Refusal: too many this minute."""
        self._admit(self._per_hook, "hook", name)

    def _admit(self, limit: RateLimitItemPerMinute, *key: str) -> None:
        if not self._limiter.hit(limit, *key):
            raise self._refusal(limit, *key)

    @contextmanager
    def source(self, address: str) -> Iterator[None]:
        """A request of this source. Raises Refusal when too many of its requests were refused this minute."""
        if not self._limiter.test(self._refused_per_source, "source", address):
            raise self._refusal(self._refused_per_source, "source", address)
        try:
            yield
        except Refusal as refusal:
            if refusal.kind in _BLAMED:
                self._limiter.hit(self._refused_per_source, "source", address)
            raise

    def _refusal(self, limit: RateLimitItemPerMinute, *key: str) -> Refusal:
        window = self._limiter.get_window_stats(limit, *key)

        return Refusal(
            Kind.OVERLOADED,
            "too-many-callbacks",
            f"Too many requests to this address: at most {limit.amount} in a minute.",
            limit=limit.amount,
            retry_after_seconds=max(1.0, window.reset_time - time.time()),
        )
