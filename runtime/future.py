"""Future: a result that comes later, cheap enough for a hot path.

``concurrent.futures.Future`` costs a condition variable and about 10 us a use. This one makes an event only when somebody
really blocks, and lets the waiting thread itself drive the transport's progress (DESIGN, "Progress"), which is what
makes a shared-memory round trip a few microseconds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from runtime.deadline import Deadline

T = TypeVar("T")
_PENDING: Any = object()


class Future(Generic[T]):
    """A value or an error, set once by a producer, read by any thread.

    ``drive(deadline, done)``, if given, is called by a waiting thread instead of sleeping: it makes progress until
    ``done()`` is true or the deadline passes, and may raise.

    Setting twice is ignored, first wins: a completion and an abort may race, and both are right.
    """

    # Defaults live in the class, so that making one sets only what differs.
    _value: Any = _PENDING
    _error: BaseException | None = None
    _callbacks: list[Callable[[Future[T]], None]] | None = None
    _waiter: threading.Event | None = None

    def __init__(
        self, what: str = "result", drive: Callable[[Deadline, Callable[[], bool]], None] | None = None
    ) -> None:
        self.what = what
        self._drive = drive
        self._guard = threading.Lock()

    @property
    def drive(self) -> Callable[[Deadline, Callable[[], bool]], None] | None:
        """What a waiting thread may call to make progress itself, for those who wait for the first of several futures."""
        return self._drive

    def done(self) -> bool:
        return self._value is not _PENDING

    def set_result(self, value: T) -> bool:
        """Set the value and run callbacks on this thread. False if it was set before."""
        with self._guard:
            if self._value is not _PENDING:
                return False
            self._value = value
        if self._waiter is not None or self._callbacks is not None:
            self._tell()
        return True

    def set_exception(self, error: BaseException) -> bool:
        """Set an error and run callbacks on this thread. False if it was set before."""
        with self._guard:
            if self._value is not _PENDING:
                return False
            self._error = error  # first: who sees a value does not take the lock
            self._value = None
        if self._waiter is not None or self._callbacks is not None:
            self._tell()
        return True

    def _tell(self) -> None:
        # Only the thread that set the future comes here, and nobody adds to it any more.
        if self._waiter is not None:
            self._waiter.set()
        callbacks, self._callbacks = self._callbacks, None
        for callback in callbacks or ():
            callback(self)

    def add_done_callback(self, callback: Callable[[Future[T]], None]) -> None:
        """Call ``callback(self)`` when set: at once on this thread if it is set already, else on the setter's thread.

        A callback must not block and must not raise.
        """
        with self._guard:
            if self._value is _PENDING:
                if self._callbacks is None:
                    self._callbacks = []
                self._callbacks.append(callback)
                return
        callback(self)

    def result(self, deadline: Deadline) -> T:
        """Wait and return the value, raise the error, or raise DeadlineError naming ``what``."""
        if self._value is _PENDING:
            self._wait(deadline)
        if self._error is not None:
            raise self._error
        return self._value

    def exception(self, deadline: Deadline) -> BaseException | None:
        """Wait and return the error, or None when there is a value."""
        if self._value is _PENDING:
            self._wait(deadline)
        return self._error

    def _wait(self, deadline: Deadline) -> None:
        if self._drive is not None:
            self._drive(deadline, self.done)
        if self._value is not _PENDING:
            return
        with self._guard:
            if self._value is not _PENDING:
                return
            if self._waiter is None:
                self._waiter = threading.Event()
            waiter = self._waiter
        if not waiter.wait(deadline.remaining()):
            raise deadline.error(self.what)


def completed(value: T) -> Future[T]:
    """A future that is set already."""
    future: Future[T] = Future()
    future.set_result(value)
    return future


def failed(error: BaseException) -> Future[Any]:
    """A future that has failed already."""
    future: Future[Any] = Future()
    future.set_exception(error)
    return future
