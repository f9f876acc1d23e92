"""The two protocols of Jia et al. (IJPP 2018, Fig. 4) as they were published, with their three optimisations switchable.

READ: request -> "request for READ" {size, addr, rkey} -> the receiver reads -> finish. Three messages.
WRITE: request -> "request for WRITE" {size} -> both ends make their buffers at the same time -> "ready for WRITE"
{addr, rkey} -> the sender writes -> finish. Four messages.

Both go through a registered buffer at each end, with a copy into it and one out of it. The optimisations: *message reuse*
sends control messages from buffers registered once (off: one is made and registered for every message); *tensor reuse*
keeps tensor buffers in a table by (tensor, source, destination), never freed; the *pool* takes buffers from one block
registered at the start (off: each is allocated and registered by itself). They exist so that an experiment can show
what each is worth; ``read`` and ``write`` are what we would use.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from runtime.errors import ArenaFullError, CorruptMessageError
from runtime.memory.arena import Block
from runtime.tensor import TensorSpec
from runtime.transport.onesided import messages
from runtime.transport.onesided.link import Region
from runtime.transport.onesided.messages import Kind, Mode
from runtime.transport.onesided.protocol import family, flat, spec_bytes

if TYPE_CHECKING:
    from runtime.transport.onesided.channel import OneSidedChannel
    from runtime.transport.onesided.endpoint import Endpoint
    from runtime.transport.onesided.fetching import Fetching
    from runtime.transport.onesided.serving import Answer, ServingEndpoint


class Buffer:
    """A registered buffer; ``block`` where it is the pool's."""

    __slots__ = ("block", "busy", "key", "memory")

    def __init__(self, key: str | None, memory: np.ndarray, block: Block | None) -> None:
        self.key = key
        self.memory = memory
        self.block = block
        self.busy = True


class Buffers:
    """The tensor buffers of one end of a connection. Its endpoint's lock is held around every call."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._pool = endpoint.transport.settings.pool
        self._reuse = endpoint.transport.settings.tensor_reuse
        self._table: dict[str, Buffer] = {}

    def take(self, key: str, nbytes: int) -> tuple[Buffer, np.ndarray, Region]:
        """A buffer for a tensor, the part of it that the tensor fills, and that part's region. ArenaFullError, OSError."""
        name = family(key)
        buffer = self._table.get(name)
        if buffer is None or buffer.busy or buffer.memory.nbytes < nbytes:
            fresh = self._make(name, nbytes)
            if self._reuse and (buffer is None or not buffer.busy):
                if buffer is not None:
                    self._destroy(buffer)
                self._table[name] = fresh
                fresh.key = name
            buffer = fresh
        buffer.busy = True
        memory = buffer.memory[:nbytes]
        return buffer, memory, self._endpoint.link.region(memory)

    def give(self, buffer: Buffer) -> None:
        """The transfer is over."""
        buffer.busy = False
        if buffer.key is None:
            self._destroy(buffer)

    def close(self) -> None:
        """Give everything back. The peer has stopped, or the link is closed."""
        for buffer in self._table.values():
            self._destroy(buffer)
        self._table.clear()

    def _make(self, name: str, nbytes: int) -> Buffer:
        counters = self._endpoint.counters
        counters.allocations += 1
        if self._pool:
            block = self._endpoint.transport.arena.allocate(nbytes, f"buffer of {name}")
            return Buffer(None, block.memory, block)
        counters.registrations += 1
        return Buffer(None, self._endpoint.link.allocate(nbytes), None)

    def _destroy(self, buffer: Buffer) -> None:
        if buffer.block is not None:
            self._endpoint.transport.arena.free(buffer.block)
        else:
            self._endpoint.link.free(buffer.memory)


class PaperReceiver:
    """The Recv side of Fig. 4. The channel's lock is held around every call."""

    def __init__(self, channel: OneSidedChannel) -> None:
        self._channel = channel
        self.buffers = Buffers(channel)

    def offered(self, fetch: Fetching, source: Region, spec: TensorSpec) -> None:
        """ "Request for READ" has come."""
        if source.nbytes != spec.nbytes:
            raise CorruptMessageError(f"request for READ of {source.nbytes} bytes, the tensor is {spec}")
        memory = self._begin(fetch, spec)
        if memory is not None:
            self._channel._read(memory[0], source, partial(self._arrived, fetch, memory[0]))

    def announced(self, fetch: Fetching, spec: TensorSpec) -> None:
        """ "Request for WRITE" has come."""
        memory = self._begin(fetch, spec)
        if memory is not None:
            fetch.exposed = True
            self._channel._send(messages.encode_again(fetch.request, memory[1]))

    def written(self, fetch: Fetching) -> None:
        """The sender's WRITE has landed."""
        assert fetch.buffer is not None and fetch.landing is not None
        self._arrived(fetch, fetch.buffer.memory[: fetch.landing.nbytes], None)

    def _begin(self, fetch: Fetching, spec: TensorSpec) -> tuple[np.ndarray, Region] | None:
        channel = self._channel
        if fetch.buffer is not None:
            raise CorruptMessageError(f"{channel.peer} answers request {fetch.request} twice")
        if fetch.done():  # its deadline has passed
            channel._send(messages.pack_header(Kind.RELEASE, 0, 0, fetch.request))
            channel._drop(fetch.request)
            return None
        fetch.landing = channel._target(fetch, spec, messages.encode_spec(spec))
        if fetch.landing is None:
            channel._send(messages.pack_header(Kind.RELEASE, 0, 0, fetch.request))
            return None
        try:
            fetch.buffer, memory, region = self.buffers.take(fetch.key, spec.nbytes)
        except (ArenaFullError, OSError) as error:
            channel._send(messages.pack_header(Kind.RELEASE, 0, 0, fetch.request))
            channel._end(fetch, error)
            return None
        return memory, region

    def _arrived(self, fetch: Fetching, memory: np.ndarray, error: BaseException | None) -> None:
        if error is not None:
            return
        channel = self._channel
        assert fetch.landing is not None and fetch.buffer is not None
        np.copyto(flat(fetch.landing), memory)
        channel.counters.copies += 1
        self.buffers.give(fetch.buffer)
        channel._send(messages.pack_header(Kind.RELEASE, 0, 0, fetch.request))
        channel._finish(fetch, fetch.landing, fetch.landing.nbytes)


class PaperSender:
    """The Send side of Fig. 4. The endpoint's lock is held around every call."""

    def __init__(self, endpoint: ServingEndpoint) -> None:
        self._endpoint = endpoint
        self.buffers = Buffers(endpoint)

    def respond(self, answer: Answer, array: np.ndarray) -> None:
        """The tensor is there: copy it into a registered buffer and tell the receiver."""
        endpoint, request, data = self._endpoint, answer.fetch.request, spec_bytes(array)
        write = answer.fetch.mode is Mode.PAPER_WRITE
        if write:  # first, so that the receiver makes its buffer while we make ours
            endpoint._send(messages.encode_metadata(request, data))
        answer.buffer, answer.memory, region = self.buffers.take(answer.fetch.key, array.nbytes)
        np.copyto(answer.memory.view(array.dtype).reshape(array.shape), array)
        endpoint.counters.copies += 1
        if not write:
            endpoint._send(messages.encode_offer(request, region, 0, data))

    def write(self, answer: Answer, into: Region, done: Callable[[BaseException | None], None]) -> None:
        """ "Ready for WRITE" has come."""
        assert answer.memory is not None
        self._endpoint._write(answer.memory, into, answer.fetch.request, done)
