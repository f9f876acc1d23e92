"""StepState: what the running step shares with the calls that were compiled for all steps."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from runtime.deadline import Deadline
from runtime.errors import DeadlineError
from runtime.execution.rendezvous import Rendezvous
from runtime.future import Future

# How long a thread drives a transport before it looks whether an abort, which no transport reports, has come in.
_DRIVE_NS = 20_000_000


Drive = Callable[[Deadline, Callable[[], bool]], None]


class Release(Future[None]):
    """Done when a sent tensor's memory is free again; called by whoever read it, once or more, on any thread."""

    __slots__ = ()

    def __call__(self) -> None:
        self.set_result(None)


class _Bell:
    """Wakes the thread that runs the step, if it sleeps: ringing for one that does not would cost a microsecond each time."""

    __slots__ = ("_event", "_sleeping")

    def __init__(self) -> None:
        self._event = threading.Event()
        self._sleeping = False

    def ring(self) -> None:
        if self._sleeping:
            self._event.set()

    def sleep(self, inbox: deque[tuple[int, Future]], seconds: float) -> None:
        """Sleep until rung, unless the inbox holds something already."""
        # Flag first, then look; the ringer fills the inbox first, then looks at the flag: one of the two sees the other.
        self._event.clear()
        self._sleeping = True
        if not inbox:
            self._event.wait(seconds)
        self._sleeping = False


class StepState:
    """Kernels read ``id`` and ``deadline`` of the running step.

    It refers to no call and no array, so that calls can refer to it without a cycle. All but the completions of what is
    watched happens on the thread that runs the step.
    """

    def __init__(self) -> None:
        self.id = 0
        self.deadline = Deadline(0, 0)
        self.rendezvous: Rendezvous | None = None
        self.inbox: deque[tuple[int, Future]] = deque()
        self.watched: dict[int, Future] = {}
        self.in_flight: list[Release] = []
        self.receiving = False  # peers may write into this executor's slots
        self._bell = _Bell()
        self._drives: dict[Drive | None, int] = {}  # of what is watched, with how many futures have it

    def begin(self, step: int, rendezvous: Rendezvous | None, deadline: Deadline) -> None:
        """Forget the step before, except what it still has in flight."""
        self.id = step
        self.deadline = deadline
        self.rendezvous = rendezvous
        self.receiving = False
        # Late completions of a step that failed go to the inbox which their callbacks hold, not to this one.
        self.inbox = deque()
        self.forget()

    def forget(self) -> None:
        """Watch nothing any more."""
        self.watched = {}
        self._drives = {}

    def watch(self, event: int, future: Future) -> None:
        """Put (event, future) into the inbox when the future is done."""
        if future.done():
            self.inbox.append((event, future))
            return
        self.watched[event] = future
        drive = future.drive
        self._drives[drive] = self._drives.get(drive, 0) + 1
        future.add_done_callback(partial(_deliver, event, self.inbox, self._bell))

    def take(self) -> tuple[int, Future]:
        """The oldest of the inbox, which is watched no longer."""
        event, future = self.inbox.popleft()
        if self.watched.pop(event, None) is not None:
            drive = future.drive
            left = self._drives[drive] - 1
            if left:
                self._drives[drive] = left
            else:
                del self._drives[drive]
        return event, future

    def sending(self) -> Release:
        """The release of one Send; the next step that writes to the same memory waits for it."""
        release = Release("release of a sent tensor")
        self.in_flight.append(release)
        return release

    def wait(self) -> bool:
        """Wait until the inbox holds something; False at the deadline.

        Where all that is watched is driven by the same transport, this thread drives it; else it sleeps until a callback.
        """
        inbox, deadline = self.inbox, self.deadline
        drive = next(iter(self._drives)) if len(self._drives) == 1 else None
        while not inbox:
            now = time.monotonic_ns()
            if now >= deadline.at_ns:
                return False
            turn = min(now + _DRIVE_NS, deadline.at_ns)
            if drive is not None:
                with contextlib.suppress(DeadlineError):
                    drive(Deadline(turn, now), lambda: bool(inbox))
                if inbox or time.monotonic_ns() >= turn:
                    continue
            # Nobody to drive, or another thread drives already.
            self._bell.sleep(inbox, deadline.remaining() if drive is None else _DRIVE_NS * 1e-9)
        return True

    def drain(self, futures: Sequence[Future]) -> bool:
        """Wait until all futures are done, whatever else happens to the step; False at the deadline."""
        for future in futures:
            if not future.done():
                try:
                    future.result(self.deadline)
                except DeadlineError:
                    return False
        return True


def _deliver(event: int, inbox: deque[tuple[int, Future]], bell: _Bell, future: Future) -> None:
    inbox.append((event, future))
    bell.ring()
