"""Pending: a fetch that has been asked for, and the rules by which its destination is written."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from runtime.deadline import Deadline
from runtime.errors import ArenaFullError, ConfigError, CorruptMessageError, ShapeError
from runtime.future import Future
from runtime.memory.arena import Arena
from runtime.tensor import TensorSpec, byte_view
from runtime.transport.base import MAX_KEY_BYTES


def encode_key(key: str) -> bytes:
    """The key's bytes on the wire; ConfigError if it is too long."""
    raw = key.encode()
    if len(raw) > MAX_KEY_BYTES:
        raise ConfigError(f"key of {len(raw)} bytes is longer than {MAX_KEY_BYTES}: {key[:80]}...")
    return raw


class FetchFuture(Future[np.ndarray]):
    """A future that tells its channel when somebody counts on being called back instead of waiting (and so driving)."""

    def __init__(
        self,
        what: str,
        drive: Callable[[Deadline, Callable[[], bool]], None] | None = None,
        hurry: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(what, drive)
        self._hurry = hurry

    def add_done_callback(self, callback: Callable[[Future[np.ndarray]], None]) -> None:
        super().add_done_callback(callback)
        if self._hurry is not None and not self.done():
            self._hurry()


class Pending:
    """One fetch: where its tensor goes, and its future.

    Bytes are written only through ``write``, and never after ``fail`` returned, so that the caller may use ``into`` again as
    soon as its future is done. Whoever wrote counts what it wrote and then calls ``complete``, so that counters and spans show a
    fetch as soon as its future is done. Any thread may call anything. ``asked_ns`` and ``copy_ns`` are for traces: when it was
    asked for, and the time spent in copying.
    """

    __slots__ = (
        "_bytes", "_error", "_fresh", "_guard", "_into", "_over", "_received", "_spec",
        "asked_ns", "copy_ns", "deadline", "future", "key",
    )  # fmt: skip

    def __init__(
        self,
        key: str,
        into: np.ndarray | None,
        deadline: Deadline,
        what: str,
        drive: Callable[[Deadline, Callable[[], bool]], None] | None = None,
        hurry: Callable[[], None] | None = None,
    ) -> None:
        if into is not None and not (into.flags.c_contiguous and into.flags.writeable):
            raise ShapeError(f"{what}: the destination must be C-contiguous and writable")
        self.key = key
        self.deadline = deadline
        self.future = FetchFuture(what, drive, hurry)
        self.asked_ns = 0
        self.copy_ns = 0
        self._into = into
        self._guard = threading.Lock()
        self._over = False
        self._error: BaseException | None = None
        self._fresh = False
        self._spec: TensorSpec | None = None
        self._bytes: np.ndarray | None = None
        self._received = 0

    def write(self, spec: TensorSpec, offset: int, data: memoryview | np.ndarray, arena: Arena) -> int:
        """Put bytes of the tensor to their place; ``complete`` is due afterwards.

        Returns the number of fresh destinations this call made (0 or 1), and -1 if the fetch is over: failed before, or
        now because the destination does not fit. CorruptMessageError if parts of different tensors come.
        """
        fresh = 0
        with self._guard:
            if self._over:
                return -1
            if self._spec is None:
                self._error = self._begin(spec, arena)
                if self._error is not None:
                    self._over = True
                    return -1
                fresh = int(self._fresh)
            elif self._spec != spec:
                raise CorruptMessageError(f"{self.future.what}: a part of {spec} came for a tensor of {self._spec}")
            if offset != self._received:
                raise CorruptMessageError(f"{self.future.what}: byte {offset} came where {self._received} was due")
            size = len(data)
            if size:
                # numpy gives the GIL up while it copies; a memoryview would not.
                self._bytes[offset : offset + size] = data  # type: ignore[index]
                self._received += size
            self._over = self._received >= spec.nbytes
        return fresh

    def complete(self) -> None:
        """Set the future if the last bytes have been written, or if the destination did not fit. Not to be called with a lock
        held: a callback may abort the channel, and that comes back to ``fail``."""
        if self._error is not None:
            self.future.set_exception(self._error)
        elif self._spec is not None and self._received >= self._spec.nbytes:
            self.future.set_result(self._into)  # type: ignore[arg-type]

    def _begin(self, spec: TensorSpec, arena: Arena) -> BaseException | None:
        into = self._into
        if into is None:
            try:
                into = self._into = arena.tensor(spec, self.key)
            except ArenaFullError as full:
                return full
            self._fresh = True
        elif into.shape != spec.shape or into.dtype != spec.dtype:
            return ShapeError(f"{self.future.what}: the tensor is {spec}, the destination {TensorSpec.of(into)}")
        self._spec = spec
        self._bytes = byte_view(into)
        return None

    def fail(self, error: BaseException) -> None:
        """Fail the future. When this returns the destination is not written any more."""
        with self._guard:
            self._over = True
        self.future.set_exception(error)
