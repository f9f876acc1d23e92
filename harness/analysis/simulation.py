"""Discrete-event simulation of parameter-server training: a step's operations and transfers on hosts and links.

A worker's step is a small dataflow of *operations* (seconds on one host's processor) and *transfers* (bytes from one host to
another). A host does one operation at a time, oldest ready first; handling bytes is a thread of its own beside it, and
``cores`` limits how many threads of all hosts run at once where the "hosts" are processes of one machine. A channel (an
ordered pair of hosts) carries one transfer at a time, in order, as a queue pair or a TCP stream does. The transfers that are
on the wire at once share each link equally: every host has a full-duplex link, and a transfer's rate is the smaller of its
two shares. Where ``k`` channels use one direction of a link, the link as a whole delivers
``bandwidth / (1 + contention * (k - 1))``: the one fitted parameter, which stands for incast loss over TCP and for
processor contention at the server.

Pure: knows numbers only, neither runtime nor files. Times are seconds, sizes bytes, rates bytes a second.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial


@dataclass(frozen=True, slots=True)
class Network:
    """One kind of link. ``latency`` is added to each transfer once; ``handling`` is the processor time by bytes that each transfer
    takes at the sending *and* at the receiving host (syscalls, copies, completion handling).
    ``inline``: the thread that sends spends it by itself, and the receiver nothing (a copy into mapped memory)."""

    bandwidth: float
    latency: float = 0.0
    handling: Callable[[int], float] = lambda nbytes: 0.0
    contention: float = 0.0
    inline: bool = False


@dataclass(frozen=True, slots=True)
class Operation:
    """``seconds`` of work on ``host`` after everything in ``after`` (indices into the step's list) is done."""

    host: str
    seconds: float
    after: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Transfer:
    """``nbytes`` from host ``src`` to host ``dst`` after everything in ``after`` is done. ``thread``: which of the host's
    threads sends, where that matters; the host's only one by default."""

    src: str
    dst: str
    nbytes: int
    after: tuple[int, ...] = ()
    thread: str = ""


Step = Sequence[Operation | Transfer]


@dataclass(frozen=True, slots=True)
class Outcome:
    """``finished[w]``: the times at which worker ``w`` ended its steps; ``busy``: seconds each host's processor worked;
    ``sent``: bytes each host sent; ``seconds``: when the last counted step ended."""

    finished: list[list[float]]
    busy: dict[str, float]
    sent: dict[str, int]
    seconds: float

    def rate(self, skip: int = 0) -> float:
        """Global steps a second after the first ``skip`` global steps (while the pipeline fills)."""
        ends = sorted(itertools.chain.from_iterable(self.finished))
        if len(ends) <= skip + 1:
            raise ValueError(f"{len(ends)} steps are too few to skip {skip} of them")
        begin = ends[skip - 1] if skip else 0.0
        return (len(ends) - skip) / (ends[-1] - begin)


def simulate(
    steps: Sequence[Step],
    network: Network,
    total_steps: int,
    *,
    synchronous: bool = False,
    stagger: float = 0.0,
    jitter: float = 0.0,
    seed: int = 0,
    cores: int | None = None,
) -> Outcome:
    """Run ``total_steps`` global steps of several workers; ``steps[w]`` is what worker ``w`` does each time.

    Worker ``w`` starts at ``w * stagger`` seconds. It matters: asynchronous workers that start at one instant stay in phase
    for ever, all pulling and then all pushing, and use one direction of the server's link at a time. Each step's operations
    take ``1 + jitter * u`` times their seconds, ``u`` uniform in [-1/2, 1/2] and drawn once a step, so that phases mix as
    they do on real machines; the same ``seed`` gives the same run.

    Asynchronously, a worker begins its next step when its last one is done and the total is not reached (the paper's 300
    steps are counted over all workers). Synchronously all wait for the slowest, and a round counts as one step a worker.
    ValueError if a step names an index that does not come before.
    """
    if total_steps < 1 or not steps:
        raise ValueError("a simulation needs at least one worker and one step")
    return _Simulation(steps, network, total_steps, synchronous, stagger, jitter, random.Random(seed), cores).run()


@dataclass(slots=True)
class _Instance:
    """One worker's running step: how many predecessors each item still waits for, how many items are left, and by what
    its operations' seconds are multiplied."""

    worker: int
    waiting: list[int]
    left: int
    scale: float


@dataclass(slots=True)
class _Flow:
    """A transfer on the wire. ``version`` tells a stale finish event from the current one."""

    item: tuple[_Instance, int]
    channel: tuple[str, str]
    left: float
    rate: float = 0.0
    since: float = 0.0
    version: int = 0


@dataclass(slots=True)
class _Host:
    queue: deque[tuple[float, Callable[[], None]]] = field(default_factory=deque)
    running: bool = False
    busy: float = 0.0
    sent: int = 0
    sending: set[tuple[str, str]] = field(default_factory=set)
    receiving: set[tuple[str, str]] = field(default_factory=set)


class _Simulation:
    def __init__(
        self,
        steps: Sequence[Step],
        network: Network,
        total_steps: int,
        synchronous: bool,
        stagger: float,
        jitter: float,
        source: random.Random,
        cores: int | None,
    ) -> None:
        self.steps = steps
        self.network = network
        self.total = total_steps
        self.synchronous = synchronous
        self.stagger = stagger
        self.jitter = jitter
        self.random = source
        self.free_cores = cores
        self.starved: deque[_Host] = deque()  # threads that have work and wait for a core
        self.successors = [_successors(step) for step in steps]
        self.now = 0.0
        self.events: list[tuple[float, int, object, int]] = []
        self.ticket = itertools.count()
        self.hosts: dict[str, _Host] = {}
        self.queues: dict[tuple[str, str], deque[tuple[_Instance, int]]] = {}
        self.flows: dict[tuple[str, str], _Flow] = {}
        self.started = 0
        self.finished: list[list[float]] = [[] for _ in steps]
        self.round_left = 0

    def run(self) -> Outcome:
        if self.synchronous:
            self._begin_round()
        else:
            for worker in range(len(self.steps)):
                self._at(worker * self.stagger, partial(self._begin, worker))
        while self.events:
            self.now, _, what, version = heapq.heappop(self.events)
            if isinstance(what, _Flow):
                if what.version == version:
                    self._flow_done(what)
            else:
                what()  # type: ignore[operator]
        return Outcome(
            self.finished,
            {name: host.busy for name, host in self.hosts.items()},
            {name: host.sent for name, host in self.hosts.items()},
            self.now,
        )

    def _begin_round(self) -> None:
        if self.started < self.total:
            self.round_left = len(self.steps)
            for worker in range(len(self.steps)):
                self._begin(worker)

    def _begin(self, worker: int) -> None:
        if self.started >= self.total:
            self.round_left -= 1
            return
        self.started += 1
        step = self.steps[worker]
        scale = 1.0 + self.jitter * (self.random.random() - 0.5)
        instance = _Instance(worker, [len(item.after) for item in step], len(step), scale)
        for index, item in enumerate(step):
            if not item.after:
                self._ready(instance, index)

    def _ready(self, instance: _Instance, index: int) -> None:
        item = self.steps[instance.worker][index]
        if isinstance(item, Operation):
            self._compute(item.host, item.seconds * instance.scale, lambda: self._done(instance, index))
            return
        overhead = self.network.handling(item.nbytes)
        channel = (item.src, item.dst)

        def enqueue() -> None:
            self.queues.setdefault(channel, deque()).append((instance, index))
            self._start_flow(channel)

        if overhead:
            sender = (item.thread or item.src) if self.network.inline else _handler(item.src)
            self._compute(sender, overhead, enqueue)
        else:
            enqueue()

    def _done(self, instance: _Instance, index: int) -> None:
        instance.left -= 1
        for successor in self.successors[instance.worker][index]:
            instance.waiting[successor] -= 1
            if not instance.waiting[successor]:
                self._ready(instance, successor)
        if instance.left:
            return
        self.finished[instance.worker].append(self.now)
        if not self.synchronous:
            self._begin(instance.worker)
            return
        self.round_left -= 1
        if not self.round_left:
            self._begin_round()

    def _compute(self, thread: str, seconds: float, then: Callable[[], None]) -> None:
        host = self.hosts.setdefault(thread, _Host())
        host.queue.append((seconds, then))
        if not host.running:
            host.running = True
            self._take_core(host)

    def _take_core(self, host: _Host) -> None:
        if self.free_cores == 0:
            self.starved.append(host)
            return
        if self.free_cores is not None:
            self.free_cores -= 1
        seconds, then = host.queue.popleft()
        host.busy += seconds
        self._at(self.now + seconds, partial(self._computed, host, then))

    def _computed(self, host: _Host, then: Callable[[], None]) -> None:
        # What is queued goes on before what this operation makes ready, so order is that of readiness.
        if self.free_cores is not None:
            self.free_cores += 1
        host.running = bool(host.queue)
        if host.running:
            self.starved.append(host)
        while self.starved and self.free_cores != 0:
            self._take_core(self.starved.popleft())
        then()

    def _start_flow(self, channel: tuple[str, str]) -> None:
        queue = self.queues[channel]
        if channel in self.flows or not queue:
            return
        instance, index = queue.popleft()
        item = self.steps[instance.worker][index]
        assert isinstance(item, Transfer)
        self.flows[channel] = _Flow((instance, index), channel, float(item.nbytes), since=self.now)
        src, dst = channel
        sender, receiver = self.hosts.setdefault(src, _Host()), self.hosts.setdefault(dst, _Host())
        sender.sent += item.nbytes
        sender.sending.add(channel)
        receiver.receiving.add(channel)
        self._share(sender, receiver)

    def _flow_done(self, flow: _Flow) -> None:
        src, dst = flow.channel
        instance, index = flow.item
        item = self.steps[instance.worker][index]
        assert isinstance(item, Transfer)
        del self.flows[flow.channel]
        self.hosts[src].sending.discard(flow.channel)
        self.hosts[dst].receiving.discard(flow.channel)
        self._start_flow(flow.channel)
        self._share(self.hosts[src], self.hosts[dst])
        overhead = self.network.handling(item.nbytes)

        def arrived() -> None:
            if overhead and not self.network.inline:
                self._compute(_handler(dst), overhead, lambda: self._done(instance, index))
            else:
                self._done(instance, index)

        self._at(self.now + self.network.latency, arrived)

    def _share(self, sender: _Host, receiver: _Host) -> None:
        """Rates changed on these two links: settle what each flow has moved and set its new finish."""
        for channel in sender.sending | receiver.receiving:
            flow = self.flows[channel]
            flow.left = max(0.0, flow.left - flow.rate * (self.now - flow.since))
            flow.since = self.now
            flow.rate = min(
                self._share_of(len(self.hosts[channel[0]].sending)),
                self._share_of(len(self.hosts[channel[1]].receiving)),
            )
            flow.version += 1
            heapq.heappush(self.events, (self.now + flow.left / flow.rate, next(self.ticket), flow, flow.version))

    def _share_of(self, flows: int) -> float:
        return self.network.bandwidth / (1.0 + self.network.contention * (flows - 1)) / flows

    def _at(self, when: float, call: Callable[[], None]) -> None:
        heapq.heappush(self.events, (when, next(self.ticket), call, 0))


def _handler(host: str) -> str:
    """The thread of ``host`` that handles bytes."""
    return f"{host}/transport"


def _successors(step: Step) -> list[list[int]]:
    successors: list[list[int]] = [[] for _ in step]
    for index, item in enumerate(step):
        for before in item.after:
            if not 0 <= before < index:
                raise ValueError(f"item {index} of a step waits for item {before}, which does not come before it")
            successors[before].append(index)
    return successors
