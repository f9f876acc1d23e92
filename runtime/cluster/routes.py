"""TransportSet: the transports that a task holds open, and which of them carries tensors to which peer.

``auto`` prefers shared memory for peers on one host, verbs where a device reaches the peer, gRPC otherwise. A transport named
explicitly is used for every pair, or refused with the reason: nobody should have to guess which path carried the bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

from runtime.cluster.proto import control_pb2 as pb
from runtime.deadline import Deadline
from runtime.errors import ConfigError, PeerLostError, StepAbortedError, TransportError, UnavailableError
from runtime.memory.arena import Arena
from runtime.trace import Tracer
from runtime.transport.base import Channel, Counters, Options, TensorSource, Transport
from runtime.transport.registry import known, open_transport, transport_class

AUTO = "auto"
_AUTO_ORDER = ("shm", "verbs", "grpc")
# Transports whose peers map the arena: it must be shared memory then.
_MAPS_ARENA = ("shm",)


def check_policy(policy: str) -> None:
    """ConfigError unless ``policy`` is "auto" or a known transport's name."""
    if policy != AUTO and policy not in known():
        raise ConfigError(f"unknown transport {policy!r}; known: {AUTO}, {', '.join(known())}")


def wants_shared_arena(policy: str) -> bool:
    """Must a task of this policy keep its arena in shared memory?"""
    return policy in _MAPS_ARENA or (policy == AUTO and any(_usable(name) for name in _MAPS_ARENA))


def host_identity() -> str:
    """Equal for processes under one running kernel. Whether shared memory works between two of them (containers may
    forbid it) is for the transport to say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        import socket

        return socket.gethostname()


class TransportSet:
    """Opened at the first need, which is the first master that asks; all share one arena. Any thread may call.

    ``params`` are options of transports by name: ``{"grpc": {"chunk_bytes": 65536}}``.
    """

    def __init__(
        self,
        policy: str,
        *,
        source: TensorSource,
        arena: Arena,
        tracer: Tracer,
        task: str,
        token: str,
        bind: str,
        params: Mapping[str, Mapping[str, object]] | None = None,
    ) -> None:
        check_policy(policy)
        self.policy = policy
        for name in params or {}:
            if name not in known():
                raise ConfigError(f"options for an unknown transport {name!r}; known: {', '.join(known())}")
        self._params = dict(params or {})
        self._source = source
        self._arena = arena
        self._tracer = tracer
        self._task, self._token, self._bind = task, token, bind
        self._guard = threading.Lock()
        self._opened = False
        self._closed = False
        self._transports: dict[str, Transport] = {}
        self._addresses: dict[str, bytes] = {}
        self._unavailable: dict[str, str] = {}
        self._channels: dict[tuple[str, int, str], Channel] = {}
        self.host = host_identity()

    def open(self) -> None:
        """Open and listen. UnavailableError if the policy names one transport and it cannot be used. Idempotent."""
        with self._guard:
            if self._opened:
                return
            for name in _AUTO_ORDER if self.policy == AUTO else (self.policy,):
                try:
                    self._open_one(name)
                except (TransportError, ImportError) as error:
                    if self.policy != AUTO:
                        raise UnavailableError(f"{self._task}: {error}") from error
                    self._unavailable[name] = str(error)
            self._opened = True

    def _open_one(self, name: str) -> None:
        if name in _MAPS_ARENA and self._arena.fd is None:
            raise UnavailableError(f"transport {name} cannot run here: this task's arena is not shared memory")
        options = Options(self._token, self._bind, self._task, dict(self._params.get(name, {})))
        transport = open_transport(name, options, self._arena, self._tracer)
        try:
            self._addresses[name] = transport.listen(self._source)
        except BaseException:
            transport.close()
            raise
        self._transports[name] = transport

    @property
    def addresses(self) -> dict[str, bytes]:
        return dict(self._addresses)

    @property
    def unavailable(self) -> dict[str, str]:
        """Transports that ``auto`` passed over, and why."""
        return dict(self._unavailable)

    def transport(self, name: str) -> Transport:
        transport = self._transports.get(name)
        if transport is None:
            why = self._unavailable.get(name, f"its policy is {self.policy}")
            raise UnavailableError(f"{self._task} has no transport {name}: {why}")
        return transport

    def candidates(self, peer: pb.Peer) -> pb.Candidates:
        """Which transports could carry tensors to and from ``peer``, best first, and why the others could not."""
        usable, refused = [], dict(self._unavailable)
        for name in self._transports:
            if name not in peer.transports:
                refused[name] = f"{peer.task} has not opened it"
            elif self.policy == AUTO and name in _MAPS_ARENA and peer.host != self.host:
                refused[name] = f"{peer.task} is on another host"
            elif not self._transports[name].reaches(peer.transports[name]):
                refused[name] = f"its address of {peer.task} cannot be reached from {self._task}"
            else:
                usable.append(name)
        return pb.Candidates(usable=usable, refused=refused)

    def channel(self, peer: pb.Peer, name: str, deadline: Deadline) -> Channel:
        """The channel to this incarnation of ``peer``, connected at the first use; older incarnations' are dropped.
        StepAbortedError once this set is closed."""
        key = (peer.task, peer.incarnation, name)
        with self._guard:
            self._check_open()
            channel = self._channels.get(key)
        if channel is not None:
            return channel
        self.drop(peer.task, PeerLostError(f"{peer.task} was restarted"), keep=peer.incarnation)
        channel = self.transport(name).connect(peer.transports[name], peer=peer.task, deadline=deadline)
        first: Channel | None = None
        try:
            with self._guard:
                self._check_open()
                first = self._channels.setdefault(key, channel)
        finally:
            if first is not channel:
                channel.close()
        return first

    def _check_open(self) -> None:
        if self._closed:
            raise StepAbortedError(f"{self._task} is shutting down")

    def drop(self, task: str, reason: BaseException, keep: int | None = None) -> None:
        """Abort the channels to ``task``, but those to incarnation ``keep``."""
        with self._guard:
            gone = [key for key in self._channels if key[0] == task and key[1] != keep]
            channels = [self._channels.pop(key) for key in gone]
        for channel in channels:
            channel.abort(reason)

    def counters(self) -> dict[str, int]:
        """``transport.counter`` to its value, over all channels and both directions."""
        totals: dict[str, Counters] = {name: transport.totals() for name, transport in self._transports.items()}
        return {f"{name}.{key}": value for name, total in totals.items() for key, value in total.as_dict().items()}

    def close(self) -> None:
        """Close channels and transports; waits. Idempotent."""
        with self._guard:
            self._opened = self._closed = True
            channels = list(self._channels.values())
            self._channels.clear()
        for channel in channels:
            channel.close()
        for transport in self._transports.values():
            transport.close()


def choose(first: pb.Candidates, second: pb.Candidates, pair: str) -> tuple[str, str]:
    """(transport, reason) for a pair of tasks, given what each end could use; UnavailableError says why nothing fits."""
    for name in first.usable:
        if name in second.usable:
            passed = {**dict(first.refused), **dict(second.refused)}
            better = [other for other in passed if other in _AUTO_ORDER and _rank(other) < _rank(name)]
            why = "; ".join(f"not {other}: {passed[other]}" for other in better)
            return name, why or "the first choice of both ends"
    refused = {**dict(first.refused), **dict(second.refused)}
    reasons = "; ".join(f"{name}: {why}" for name, why in refused.items()) or "their policies name different ones"
    raise UnavailableError(
        f"no transport between {pair} ({', '.join(first.usable) or 'none'} against {', '.join(second.usable) or 'none'} "
        f"usable): {reasons}"
    )


def _rank(name: str) -> int:
    return _AUTO_ORDER.index(name) if name in _AUTO_ORDER else -1


def _usable(name: str) -> bool:
    try:
        return transport_class(name).probe().ok
    except ImportError:
        return False
