"""OpenChannels: the channels that a transport has open, and what those counted that are closed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Generic, TypeVar

from runtime.transport.base import Channel, Counters

C = TypeVar("C", bound=Channel)


class OpenChannels(Generic[C]):
    """Any thread may call; iteration is over the channels that are open when it begins."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._open: list[C] = []
        self._closed = Counters()

    def add(self, channel: C) -> None:
        with self._guard:
            self._open.append(channel)

    def remove(self, channel: C) -> None:
        """A closed channel: only its counters are kept. Idempotent."""
        with self._guard:
            if channel in self._open:
                self._open.remove(channel)
                self._closed.add(channel.counters)

    def totals(self) -> Counters:
        """The counters of all channels, open and closed."""
        total = Counters()
        with self._guard:
            total.add(self._closed)
            for channel in self._open:
                total.add(channel.counters)
        return total

    def close(self) -> None:
        """Close those that are open."""
        for channel in self:
            channel.close()

    def __iter__(self) -> Iterator[C]:
        with self._guard:
            return iter(list(self._open))
