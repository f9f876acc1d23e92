"""Fetching: a fetch under way, which is the future that its caller holds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from runtime.deadline import Deadline
from runtime.future import Future
from runtime.transport.onesided.messages import Mode

if TYPE_CHECKING:
    from runtime.transport.onesided.channel import OneSidedChannel
    from runtime.transport.onesided.paper import Buffer
    from runtime.transport.onesided.registration import Registration


class Fetching(Future[Any]):
    """One object a fetch, because making objects is a good part of a small fetch's time.

    ``landing`` is the memory that the peer writes to or that a read fills, held until the peer has answered, whatever
    became of the future.
    """

    # Defaults live in the class, so that making one sets only what differs.
    request = -1
    started_ns = 0
    landing: np.ndarray | None = None
    plain = False  # ``into`` is given and nothing else takes part
    exposed = False  # the peer was told where to write
    flat: memoryview | None = None
    received = 0
    registration: Registration | None = None
    buffer: Buffer | None = None  # of the paper's protocols
    spec_bytes = b""

    def __init__(
        self, channel: OneSidedChannel, key: str, into: np.ndarray | None, mode: Mode, deadline: Deadline
    ) -> None:
        # What Future's own would set, without a call; ``what`` is made when it is read.
        self._drive = channel._drive
        self._guard = threading.Lock()
        self.channel = channel
        self.key = key
        self.into = into
        self.mode = mode
        self.deadline = deadline

    def add_done_callback(self, callback: Callable[[Future[Any]], None]) -> None:
        super().add_done_callback(callback)
        self.channel.attend()

    def let_go(self) -> None:
        """Nobody writes for this fetch any more: its memory lives on only as the result that somebody holds."""
        self.landing = self.flat = None

    @property
    def what(self) -> str:  # type: ignore[override]
        """Words for errors, put together only when somebody reads them."""
        return f"fetch of {self.key} from {self.channel.whence}"
