"""Destinations: the memory that fetched tensors go to, and what a channel knows of their shapes."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np

from runtime.tensor import TensorSpec
from runtime.transport.base import Counters
from runtime.transport.onesided.fetching import Fetching
from runtime.transport.onesided.link import NO_REGION, Link, Region
from runtime.transport.onesided.protocol import family, spec_bytes

if TYPE_CHECKING:
    from runtime.transport.onesided.transport import OneSidedTransport

_SMALL_BYTES = 4096


class Destinations:
    """Belongs to one channel, whose lock is held around every call."""

    def __init__(self, transport: OneSidedTransport, link: Link, counters: Counters, eager_limit: int) -> None:
        self._transport = transport
        self._link = link
        self._counters = counters
        # Fresh destinations up to this size are no arena memory: the bookkeeping would cost more than the eager copy.
        self._small = min(eager_limit, transport.settings.eager_threshold, _SMALL_BYTES)
        self._metadata: OrderedDict[str, TensorSpec] = OrderedDict()
        self._metadata_cache = transport.settings.metadata_cache

    def known(self, fetch: Fetching, limit: int) -> Region:
        """Where the peer shall write, if that is known and larger than what would come eagerly."""
        if fetch.into is None:
            spec = self._metadata.get(family(fetch.key))
            if spec is None or spec.nbytes <= limit or not spec.nbytes:
                return NO_REGION
            fetch.landing = self.fresh(spec, fetch.key)
            fetch.spec_bytes = spec_bytes(fetch.landing)
        elif fetch.into.nbytes <= limit or not fetch.into.nbytes:
            return NO_REGION
        return self.expose(fetch)

    def expose(self, fetch: Fetching) -> Region:
        """The region of ``landing``, which is ``into`` where a peer can reach that, and staging memory where not."""
        if fetch.landing is None:
            assert fetch.into is not None
            fetch.landing = fetch.into
            try:
                return self._link.region(fetch.landing)
            except ValueError:
                if self._transport.registrations is not None:
                    fetch.registration = self._transport.registrations.acquire(fetch.landing)
                else:
                    fetch.landing = self._transport.arena.tensor(TensorSpec.of(fetch.into), f"staging of {fetch.key}")
        return self._link.region(fetch.landing)

    def fresh(self, spec: TensorSpec, key: str) -> np.ndarray:
        """Memory for a tensor that nobody gave a destination for. ArenaFullError."""
        self._counters.allocations += 1
        if spec.nbytes <= self._small:
            return np.empty(spec.shape, spec.dtype)
        return self._transport.arena.tensor(spec, key)

    def acquire(self, fetch: Fetching) -> None:
        """Make ``landing`` usable as the local side of a read."""
        registrations = self._transport.registrations
        if registrations is not None and fetch.landing is not None:
            try:
                self._link.region(fetch.landing)
            except ValueError:
                fetch.registration = registrations.acquire(fetch.landing)

    def remember(self, key: str, spec: TensorSpec) -> None:
        """The next tensor of this key's family will probably have this shape."""
        metadata = self._metadata
        metadata[family(key)] = spec
        if len(metadata) > self._metadata_cache:
            metadata.popitem(last=False)

    def conclude(self, fetch: Fetching) -> None:
        """The peer can no longer write to ``landing``."""
        fetch.exposed = False
        registration, fetch.registration = fetch.registration, None
        if registration is not None:
            assert self._transport.registrations is not None
            self._transport.registrations.release(registration)
