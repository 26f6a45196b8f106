"""Waiting for a condition, never for a time."""

import threading
import time
from collections.abc import Callable


def eventually(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Returns as soon as the condition holds; fails when it does not within the time."""
    give_up_at = time.monotonic() + seconds
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < give_up_at, "the condition never came to hold"
        pause.wait(0.01)
