"""Watch: one thread a transport that fails what has passed its deadline though nobody waits for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_NEVER = 1 << 63


class Watch:
    """Calls ``scan(now_ns)`` on its own thread when a moment given to ``at`` comes.

    ``scan`` returns the earliest moment at which it wants to be called again, or None. Asking for a later moment than the
    one already awaited costs one comparison, so a stream of requests with equal time limits wakes nobody. The thread starts
    with the first moment.
    """

    def __init__(self, name: str, scan: Callable[[int], int | None]) -> None:
        self._name = name
        self._scan = scan
        self._condition = threading.Condition()
        self._next_ns = _NEVER
        self._closed = False
        self._thread: threading.Thread | None = None

    def at(self, at_ns: int) -> None:
        """Have a scan at ``at_ns`` (of ``time.monotonic_ns``) or before. Never blocks for long; any thread."""
        if at_ns >= self._next_ns:
            return
        with self._condition:
            if at_ns >= self._next_ns or self._closed:
                return
            self._next_ns = at_ns
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._condition.notify()

    def close(self) -> None:
        """End the thread and wait for it, except from a callback that runs on it. Idempotent."""
        with self._condition:
            self._closed = True
            self._condition.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._closed and (left := self._next_ns - time.monotonic_ns()) > 0:
                    self._condition.wait(None if self._next_ns == _NEVER else left * 1e-9)
                if self._closed:
                    return
                self._next_ns = _NEVER
            again = self._scan(time.monotonic_ns())
            if again is not None:
                self.at(again)
