"""Deadline: a moment after which a wait is given up, passed down instead of one timeout a call."""

from __future__ import annotations

import time

from runtime.errors import DeadlineError


class Deadline:
    """A moment on the monotonic clock. Immutable, so any thread may read it.

    A chain of calls that all take the same deadline ends by it together; a timeout a call would add up.
    """

    __slots__ = ("_at_ns", "_started_ns")

    def __init__(self, at_ns: int, started_ns: int | None = None) -> None:
        self._at_ns = at_ns
        self._started_ns = time.monotonic_ns() if started_ns is None else started_ns

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """The moment ``seconds`` from now."""
        now = time.monotonic_ns()
        return cls(now + int(seconds * 1e9), now)

    def remaining(self) -> float:
        """Seconds left, never below zero."""
        return max(0.0, (self._at_ns - time.monotonic_ns()) * 1e-9)

    def elapsed(self) -> float:
        """Seconds since this deadline was set."""
        return (time.monotonic_ns() - self._started_ns) * 1e-9

    @property
    def at_ns(self) -> int:
        """The moment itself, in nanoseconds of ``time.monotonic_ns``."""
        return self._at_ns

    def expired(self) -> bool:
        return time.monotonic_ns() >= self._at_ns

    def error(self, what: str) -> DeadlineError:
        """The error for a wait that reached this deadline; ``what`` reads like "Recv of k from /job:ps/task:0"."""
        return DeadlineError(f"{what}: no answer for {self.elapsed():.1f} s")

    def check(self, what: str) -> None:
        """Raise DeadlineError if the moment has passed."""
        if self.expired():
            raise self.error(what)

    def __repr__(self) -> str:
        return f"<Deadline in {self.remaining():.3f} s>"
