"""fanin: n workers pull lists of tensors from m servers and push as much back; the pattern of a parameter server.

As TF-gRPC-Bench's PS throughput test (Biswas et al., arXiv 1804.01138): no graph, no compute, every worker against every
server, payloads as lists of tensors of given classes. A push is what it is in TensorFlow: the server receives, that is fetches.
An iteration ends when the worker's memory is free again; a server asks for the next generation only when it has all of the last
one, so at most one push is under way while the next pull begins.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import numpy as np

from harness.bench.base import (
    Benchmark,
    RankContext,
    check_pattern,
    close_transport,
    parameter,
    pattern,
    transport_parameter,
)
from harness.bench.fetching import Served, arena_bytes
from runtime.deadline import Deadline
from runtime.errors import ChannelClosedError, ConfigError, DeadlineError, VerbflowError
from runtime.tensor import TensorSpec
from runtime.transport.base import Channel, Lease, Reply, Transport

_SMALL, _MEDIUM, _LARGE = 1 << 10, 64 << 10, 1 << 20
PAYLOADS = {
    "small": [_SMALL] * 10,
    "medium": [_MEDIUM] * 10,
    "large": [_LARGE] * 10,
    "uniform": [_SMALL, _MEDIUM, _LARGE] * 3 + [_MEDIUM],
    "skew": [_LARGE] * 6 + [_MEDIUM] * 3 + [_SMALL],
}


@dataclass(frozen=True)
class FanInParams:
    transport: str = transport_parameter()
    servers: int = parameter(1, "servers", at_least=1, at_most=64)
    workers: int = parameter(2, "workers", at_least=1, at_most=256)
    payload: str = parameter("uniform", "classes of the tensors in one exchange", unit="text", choices=tuple(PAYLOADS))
    push: bool = parameter(True, "push as much as was pulled", unit="flag")


class Outbox:
    """What a worker offers to the servers: tensors of one generation, each asked for once a server; asking may come first."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self._arrays = arrays
        self._guard = threading.Lock()
        self._generation = 0
        self._waiting: list[tuple[int, str, Reply]] = []
        self._left = 0
        self._taken = threading.Event()
        self._closed = False

    def take(self, key: str, reply: Reply) -> None:
        """``key`` is ``generation/name``."""
        generation, _, name = key.partition("/")
        with self._guard:
            if self._closed:
                error = ChannelClosedError("the worker has ended")
            elif name not in self._arrays:
                reply(ConfigError(f"no tensor is called {name!r} here"))
                return
            elif int(generation) > self._generation:
                self._waiting.append((int(generation), name, reply))
                return
            else:
                error = None
        reply(error if error is not None else Lease(self._arrays[name], self._released))

    def publish(self, servers: int) -> threading.Event:
        """The next generation is ready; the event is set when every server has taken all of its tensors."""
        with self._guard:
            self._generation += 1
            self._left = len(self._arrays) * servers
            self._taken = taken = threading.Event()
            due = [item for item in self._waiting if item[0] <= self._generation]
            self._waiting = [item for item in self._waiting if item[0] > self._generation]
        for _, name, reply in due:
            reply(Lease(self._arrays[name], self._released))
        return taken

    def close(self) -> None:
        """Refuse what is waited for and whatever comes later."""
        with self._guard:
            self._closed = True
            waiting, self._waiting = self._waiting, []
        for _, _, reply in waiting:
            reply(ChannelClosedError("the worker has ended"))

    def _released(self) -> None:
        with self._guard:
            self._left -= 1
            done = self._left == 0
        if done:
            self._taken.set()


@dataclass
class FanInState:
    p: FanInParams
    transport: Transport
    channels: list[Channel]
    into: list[list[np.ndarray]]
    outbox: Outbox | None = None
    threads: list[threading.Thread] = field(default_factory=list)
    first_received: list[threading.Event] = field(default_factory=list)
    stopping: bool = False


class FanIn(Benchmark):
    name = "fanin"
    summary = "n workers pull from and push to m servers"
    Params = FanInParams
    operation = "exchange"

    def ranks(self, p: FanInParams) -> int:
        return p.servers + p.workers

    def timed(self, ctx: RankContext, p: FanInParams) -> bool:
        return ctx.rank >= p.servers

    def bytes_per_iteration(self, p: FanInParams) -> int:
        return sum(PAYLOADS[p.payload]) * p.servers * p.workers * (2 if p.push else 1)

    def setup(self, ctx: RankContext, p: FanInParams) -> FanInState:
        if p.transport in ("inproc", "null"):
            raise ConfigError(f"fanin needs several processes; {p.transport} stays in one")
        sizes = PAYLOADS[p.payload]
        peers = p.workers if ctx.rank < p.servers else p.servers
        transport = ctx.open(p.transport, arena_bytes(sum(sizes) * (peers + 1) + (64 << 10) * peers))
        try:
            specs = [TensorSpec((size,), np.dtype(np.uint8)) for size in sizes]
            own = {}
            for index, spec in enumerate(specs):
                array = transport.arena.allocate(spec.nbytes, f"own{index}").array(spec)
                array[:] = pattern(spec.nbytes, seed=ctx.rank * 100 + index)
                own[str(index)] = array
            outbox = Outbox(own) if self.timed(ctx, p) else None
            addresses = ctx.group.exchange_bytes(transport.listen(outbox or Served(own)))
            others = range(p.servers, ctx.size) if outbox is None else range(p.servers)
            channels = []
            into = []
            for rank in others if outbox is not None or p.push else ():
                channels.append(
                    transport.connect(addresses[rank], peer=f"/job:bench/task:{rank}", deadline=ctx.deadline)
                )
                into.append([transport.arena.allocate(spec.nbytes, f"from{rank}").array(spec) for spec in specs])
            return FanInState(p, transport, channels, into, outbox)
        except BaseException:
            close_transport(transport)
            raise

    def verify(self, ctx: RankContext, state: FanInState) -> None:
        if state.outbox is None:
            for channel, arrays in zip(state.channels, state.into):
                first = threading.Event()
                state.first_received.append(first)
                thread = threading.Thread(target=_receive, args=(ctx, state, channel, arrays, first), name="receive")
                thread.start()
                state.threads.append(thread)
        ctx.group.barrier()
        if state.outbox is not None:
            self.once(ctx, state)
        ctx.group.barrier()
        for event in state.first_received:
            if not event.wait(ctx.deadline.remaining()):
                raise DeadlineError("the first push of a worker did not arrive in time")
        lowest = 0 if state.outbox is not None else state.p.servers
        if state.outbox is not None or state.p.push:
            for at, arrays in enumerate(state.into):
                for index, array in enumerate(arrays):
                    check_pattern(array, (lowest + at) * 100 + index, f"tensor {index} of rank {lowest + at}")

    def once(self, ctx: RankContext, state: FanInState) -> int:
        assert state.outbox is not None
        futures = [
            channel.fetch(str(index), into=array, deadline=ctx.deadline)
            for channel, arrays in zip(state.channels, state.into)
            for index, array in enumerate(arrays)
        ]
        for future in futures:
            future.result(ctx.deadline)
        moved = sum(PAYLOADS[state.p.payload]) * state.p.servers
        if not state.p.push:
            return moved
        if not state.outbox.publish(state.p.servers).wait(ctx.deadline.remaining()):
            raise DeadlineError("the servers did not take the pushed tensors in time")
        return 2 * moved

    def teardown(self, ctx: RankContext, state: FanInState) -> None:
        state.stopping = True
        if state.outbox is not None:
            state.outbox.close()
        for channel in state.channels:
            channel.close()
        for thread in state.threads:
            thread.join(10)
        close_transport(state.transport)

    def transport_totals(self, ctx: RankContext, state: FanInState) -> dict[str, int]:
        return state.transport.totals().as_dict()


def _receive(
    ctx: RankContext, state: FanInState, channel: Channel, arrays: list[np.ndarray], first: threading.Event
) -> None:
    """A server's thread for one worker: fetch generation after generation until the worker ends."""
    generation = 0
    while not state.stopping:
        generation += 1
        # A generation that never comes is the normal end, so it must outlive the trial.
        deadline = Deadline.after(ctx.deadline.remaining() + 60)
        try:
            futures = [
                channel.fetch(f"{generation}/{index}", into=array, deadline=deadline)
                for index, array in enumerate(arrays)
            ]
            for future in futures:
                future.result(deadline)
        except VerbflowError:
            return
        first.set()
