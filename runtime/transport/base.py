"""The waist of the runtime: Transport, Channel and TensorSource.

As in TensorFlow (core/distributed_runtime/base_rendezvous_mgr.h), sending is passive and receiving pulls: a producer
puts a tensor into its rendezvous, a consumer *fetches* it by key over a channel. One-sided transports add static edges:
both ends agree on a destination slot when a graph is registered, and a step is one write an edge (Xue et al.,
EuroSys'19). Nothing here knows what a graph is.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import ClassVar, Protocol, TypeVar

import numpy as np

from runtime.deadline import Deadline
from runtime.errors import ConfigError
from runtime.future import Future
from runtime.memory.arena import Arena
from runtime.trace import Tracer

MAX_KEY_BYTES = 1024

Settings = TypeVar("Settings")


class Fidelity(enum.StrEnum):
    """On what a figure was measured; comparisons refuse to mix them."""

    HARDWARE = "hardware"
    SOFT_ROCE = "soft-roce"
    SOFT_ROCE_EMULATED = "soft-roce-emulated"
    LOOPBACK = "loopback"


@dataclass(frozen=True, slots=True)
class Availability:
    """The answer of ``Transport.probe``: usable, or a sentence why not, with the command that would change it."""

    ok: bool
    reason: str
    fidelity: Fidelity = Fidelity.LOOPBACK


@dataclass(slots=True)
class Counters:
    """What a channel or a transport did; the proof of which path carried the bytes. Only ever grows.

    ``copies`` counts payload copies in memory beyond the wire's own, ``registrations`` memory registrations, ``allocations``
    payload buffers newly allocated, ``metadata_misses`` fetches that had to ask twice because shape or size was not known.
    """

    fetches: int = 0
    pushes: int = 0
    served: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    messages_in: int = 0
    messages_out: int = 0
    copies: int = 0
    allocations: int = 0
    registrations: int = 0
    metadata_misses: int = 0
    wakeups: int = 0

    def as_dict(self) -> dict[str, int]:
        return asdict(self)

    def add(self, other: Counters) -> None:
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)


class Lease:
    """A read-only view of memory that its owner will not reuse until ``release`` is called.

    ``release`` is idempotent and may be called from any thread; the view must not be touched afterwards. A context
    manager. ``lent`` is the array that the view is of, for transports, which only read it: on the way of a small fetch making
    a view counts.
    """

    __slots__ = ("_release", "_view", "lent")

    def __init__(self, array: np.ndarray, release: Callable[[], None] | None = None) -> None:
        self.lent = array
        self._release = release
        self._view: np.ndarray | None = None

    @property
    def array(self) -> np.ndarray:
        """The read-only view."""
        view = self._view
        if view is None:
            view = self.lent.view()
            view.setflags(write=False)
            self._view = view
        return view

    def release(self) -> None:
        release, self._release = self._release, None
        if release is not None:
            release()

    def __enter__(self) -> np.ndarray:
        return self.array

    def __exit__(self, *exc_info: object) -> None:
        self.release()


Reply = Callable[["Lease | BaseException"], None]


class TensorSource(Protocol):
    """What a listener serves; the runtime's is the rendezvous."""

    def take(self, key: str, reply: Reply) -> None:
        """Give the tensor of ``key`` to ``reply``, once: at once on this thread, or later on the producer's.

        Never blocks. The transport calls ``lease.release()`` as soon as it has no more need of the memory, also when
        sending failed. An error given to ``reply`` reaches the fetching peer as that error's text.
        """


@dataclass(frozen=True, slots=True)
class Options:
    """How a transport is opened; every field has a default that a laptop can live with.

    ``token`` is the run's secret: a peer that does not show it is refused. ``params`` are the transport's own settings (for
    example ``eager_threshold``, ``chunk_bytes``, ``protocol``, ``binding``, ``device``); a transport refuses unknown names.
    """

    token: str = ""
    bind: str = "127.0.0.1"
    task: str = ""
    params: Mapping[str, object] = field(default_factory=dict)

    def settings(self, transport: str, cls: type[Settings]) -> Settings:
        """``params`` as an instance of ``cls``, a dataclass whose fields all have defaults.

        ConfigError names the known settings on an unknown one, and the wanted type on a value of another type.
        """
        known = {entry.name: type(entry.default) for entry in fields(cls)}  # type: ignore[arg-type]
        for name, value in self.params.items():
            wanted = known.get(name)
            if wanted is None:
                raise ConfigError(f"transport {transport} has no setting {name!r}; known: {', '.join(known) or 'none'}")
            fits = type(value) is wanted or (wanted is float and type(value) is int)
            if not fits:
                raise ConfigError(f"setting {name} of transport {transport} is {value!r}; it takes {wanted.__name__}")
        return cls(**self.params)


class Channel(ABC):
    """One peer, receiver-driven like TensorFlow's RecvTensor. Any thread may call any method.

    After ``abort`` or the peer's loss every pending future fails with the reason, and so does every later call.
    """

    peer: str
    counters: Counters

    @abstractmethod
    def fetch(self, key: str, into: np.ndarray | None = None, *, deadline: Deadline) -> Future[np.ndarray]:
        """Ask for the tensor of ``key``; the future's array is C-contiguous and owned by the caller.

        ``into`` (C-contiguous, writable) receives the tensor if its dtype and shape are the tensor's, otherwise the
        future fails with ShapeError and ``into`` is untouched; without it the array is fresh memory. Until the future is
        done the caller must not touch ``into``; after it *failed* the memory may still be written to until ``close``
        returns, if the transport is one-sided and the peer is alive but slow.
        """

    def borrow(self, key: str, *, deadline: Deadline) -> Future[Lease]:
        """Like fetch, but a read-only view; without a copy where both ends share memory (shm), else a fetched copy."""
        lease: Future[Lease] = Future(f"borrow of {key} from {self.peer}")

        def done(fetched: Future[np.ndarray]) -> None:
            error = fetched.exception(deadline)
            if error is not None:
                lease.set_exception(error)
            else:
                lease.set_result(Lease(fetched.result(deadline)))

        fetched = self.fetch(key, deadline=deadline)
        lease._drive = fetched._drive
        fetched.add_done_callback(done)
        return lease

    def prepare(self, offer: bytes) -> None:
        """Take the peer's offer of destination slots for static edges (from the peer's ``Transport.offer``).

        Only where ``Transport.supports_static``.
        """
        raise NotImplementedError(f"{type(self).__name__} has no static edges")

    def push(self, edge: int, generation: int, tensor: np.ndarray, *, deadline: Deadline) -> Future[None]:
        """Write ``tensor`` into the peer's slot of ``edge``; done when the source memory may be reused.

        Waits (in the future, not here) for the peer's credit of the generation before. Generations of an edge go up by
        one. Only after ``prepare``.
        """
        raise NotImplementedError(f"{type(self).__name__} has no static edges")

    @abstractmethod
    def close(self) -> None:
        """Fail what is pending, say goodbye, wait until no memory of ours can be written to. Idempotent."""

    @abstractmethod
    def abort(self, reason: BaseException) -> None:
        """Fail what is pending with ``reason`` now, without waiting. Idempotent; safe in a ``finally``."""


class Transport(ABC):
    """A way to move tensors between processes, chosen by name; a process may hold several."""

    name: ClassVar[str]
    supports_static: ClassVar[bool] = False

    def __init__(self, options: Options, arena: Arena, tracer: Tracer | None = None) -> None:
        self.options = options
        self.arena = arena
        self.tracer = tracer or Tracer(capacity=1)

    @classmethod
    @abstractmethod
    def probe(cls) -> Availability:
        """Can this transport be used on this machine? Cheap, no side effects, never raises."""

    @abstractmethod
    def listen(self, source: TensorSource) -> bytes:
        """Begin to serve ``source``; the answer is an opaque address for ``connect`` at a peer. Once a transport."""

    @abstractmethod
    def connect(self, address: bytes, *, peer: str, deadline: Deadline) -> Channel:
        """Open a channel to the listener at ``address``; ``peer`` is its name for messages.

        Raises UnauthenticatedError, ProtocolMismatchError, PeerLostError or DeadlineError.
        """

    def reaches(self, address: bytes) -> bool:
        """Could ``connect(address)`` work from here? For the choice of a transport per pair; never blocks."""
        return True

    def offer(self, slots: Mapping[int, np.ndarray]) -> bytes:
        """Receiver's side of static edges: edge id -> destination array inside ``arena``. Returns bytes for the sender's
        ``Channel.prepare``. Only where ``supports_static``."""
        raise NotImplementedError(f"{self.name} has no static edges")

    def arrival(self, edge: int, generation: int) -> Future[None]:
        """Done when ``generation`` of an offered edge lies complete in its slot."""
        raise NotImplementedError(f"{self.name} has no static edges")

    def release(self, edge: int, generation: int) -> None:
        """The slot's content is used up: give the sender its credit. Never blocks."""
        raise NotImplementedError(f"{self.name} has no static edges")

    def withdraw(self, edges: list[int], reason: BaseException) -> None:
        """Forget offered edges (their graph is gone): pending arrivals fail with ``reason``. The slots' memory must not be
        reused until this returns."""
        raise NotImplementedError(f"{self.name} has no static edges")

    @abstractmethod
    def totals(self) -> Counters:
        """Counters of all channels and of the serving side together, closed ones included."""

    @abstractmethod
    def close(self) -> None:
        """Close all channels and the listener; waits; leaves no thread, descriptor or file. Idempotent."""
