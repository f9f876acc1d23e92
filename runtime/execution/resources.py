"""Resources: what outlives a step on one task: variables, accumulators, queues and step counters, in named containers.

All sessions of a cluster share them. A variable is created and initialised by the first graph that is registered with
it; later ones find it as it is, and a restored checkpoint overwrites it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np

from runtime.errors import ShapeError, StepAbortedError
from runtime.execution.accumulator import Accumulator
from runtime.execution.step_counter import StepCounter
from runtime.execution.tensor_queue import TensorQueue
from runtime.memory.arena import Arena
from runtime.tensor import TensorSpec

Initialise = Callable[[np.ndarray], None]


class UpdateLock:
    """Held while an op changes a variable: one op a variable at a time, and no snapshot meanwhile. A context manager.

    Its waits have no deadline because every holder only computes or copies in memory and never waits for a peer.
    """

    __slots__ = ("_gate", "_lock")

    def __init__(self, gate: _Gate) -> None:
        self._gate = gate
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()
        self._gate.enter()

    def __exit__(self, *error: object) -> None:
        self._gate.leave()
        self._lock.release()


class _Gate:
    """Lets updates in together, and a snapshot only while there are none."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._updates = 0
        self._closed = 0

    def enter(self) -> None:
        with self._changed:
            while self._closed:
                self._changed.wait()
            self._updates += 1

    def leave(self) -> None:
        with self._changed:
            self._updates -= 1
            if self._updates == 0 and self._closed:
                self._changed.notify_all()

    @contextmanager
    def closed(self) -> Iterator[None]:
        with self._changed:
            self._closed += 1  # from here on no update begins
            while self._updates:
                self._changed.wait()
        try:
            yield
        finally:
            with self._changed:
                self._closed -= 1
                self._changed.notify_all()


@dataclass(slots=True)
class _Variable:
    spec: TensorSpec
    lock: UpdateLock
    ready: threading.Lock  # held while the creator initialises the memory
    memory: np.ndarray | None = None
    failed: bool = False  # could not be created, and is no longer in the table


class _Waiting(Protocol):
    def cancel(self, step: int, reason: BaseException) -> None: ...
    def abort(self, reason: BaseException) -> None: ...


W = TypeVar("W", bound=_Waiting)


@dataclass(slots=True)
class _Container:
    gate: _Gate = field(default_factory=_Gate)
    variables: dict[str, _Variable] = field(default_factory=dict)
    waiting: dict[tuple[type, str], Any] = field(default_factory=dict)


class Resources:
    """One a task. Any thread may call anything. ``container`` "" is the default one.

    Variables live in ``arena`` (the task's, so that peers can be sent them without a copy), or in ordinary memory without one.
    Arrays that were handed out stay valid for as long as somebody holds them, even after ``clear``.
    """

    def __init__(self, arena: Arena | None = None) -> None:
        self.arena = arena
        self._guard = threading.Lock()
        self._containers: dict[str, _Container] = {}
        self._reason: BaseException | None = None

    def variable(
        self, name: str, spec: TensorSpec, initialise: Initialise | None = None, container: str = ""
    ) -> np.ndarray:
        """The live memory of a variable, created and initialised (zeros without ``initialise``) if it is absent.

        ShapeError if it exists with another spec. Of several callers at once one initialises and the others wait for it. One
        that could not be created, as in a full arena, leaves nothing behind, so that it may come again with another spec.
        """
        while True:
            record = self._record(container, name, spec)
            with record.ready:
                if record.failed:
                    continue
                if record.memory is None:
                    try:
                        memory = self._allocate(spec, name)
                        memory.fill(0)
                        if initialise is not None:
                            initialise(memory)
                    except BaseException:
                        record.failed = True
                        with self._guard:
                            table = self._container(container).variables
                            if table.get(name) is record:  # the container may have been cleared meanwhile
                                del table[name]
                        raise
                    record.memory = memory
                return record.memory

    def update_lock(self, name: str, spec: TensorSpec, container: str = "") -> UpdateLock:
        """The lock to hold while changing a variable, and the slots that belong to it."""
        return self._record(container, name, spec).lock

    def variables(self, container: str = "") -> dict[str, np.ndarray]:
        """Live memory of all variables by name. It changes under the reader; ``snapshot`` copies it safely."""
        with self._guard:
            records = list(self._container(container).variables.items())
        return {name: record.memory for name, record in records if record.memory is not None}

    def snapshot(self, container: str = "", names: Collection[str] | None = None) -> dict[str, np.ndarray]:
        """Copies of all variables (of those in ``names`` that exist), taken while no update is half done. Updates wait
        meanwhile, reads do not."""
        with self._closed(container):
            return {
                name: memory.copy()
                for name, memory in self.variables(container).items()
                if names is None or name in names
            }

    def restore(self, values: Mapping[str, np.ndarray], container: str = "") -> None:
        """Set variables, creating those that are absent, while no update is half done. ShapeError names the first that differs.

        Nothing is written if one of them does not fit. Gradients gathered so far belong to the old values: accumulators
        forget them, and who waits for them fails.
        """
        specs = {name: TensorSpec.of(value) for name, value in values.items()}
        with self._guard:  # before any is created, because a record made for a wrong value would bar the right one
            for name, record in self._container(container).variables.items():
                _check_spec(name, container, record.spec, specs.get(name, record.spec))
        for name, spec in specs.items():
            self.variable(name, spec, None, container)
        records = [(name, self._record(container, name, spec)) for name, spec in specs.items()]
        with self._closed(container):
            for name, record in records:
                assert record.memory is not None
                write = partial(np.copyto, record.memory, values[name])
                counter = self._find(container, StepCounter, name)
                if counter is None:
                    write()
                else:
                    counter.change(write)
        reason = StepAbortedError(f"variables of container {container!r} were restored; run the step again")
        for accumulator in self.accumulators(container).values():
            accumulator.reset(reason)

    def accumulator(self, name: str, spec: TensorSpec, container: str = "") -> Accumulator:
        """The accumulator called ``name``, created if it is absent; ShapeError if it has another spec."""
        found = self._find_or_add(container, Accumulator, name, lambda: Accumulator(name, spec))
        if found.spec != spec:
            raise ShapeError(f"accumulator {name} is {found.spec}, not {spec}")
        return found

    def queue(self, name: str, spec: TensorSpec, capacity: int, container: str = "") -> TensorQueue:
        """The queue called ``name``, created if it is absent; ShapeError if it has another spec."""
        found = self._find_or_add(container, TensorQueue, name, lambda: TensorQueue(name, spec, capacity))
        if found.spec != spec:
            raise ShapeError(f"queue {name} holds {found.spec}, not {spec}")
        return found

    def step_counter(self, name: str, initialise: Initialise | None = None, container: str = "") -> StepCounter:
        """The barrier on the int64 scalar variable called ``name``."""
        value = self.variable(name, TensorSpec((), np.dtype(np.int64)), initialise, container)
        return self._find_or_add(container, StepCounter, name, lambda: StepCounter(name, value))

    def accumulators(self, container: str = "") -> dict[str, Accumulator]:
        """All accumulators by name, for their counters."""
        with self._guard:
            waiting = dict(self._container(container).waiting)
        return {name: found for (kind, name), found in waiting.items() if kind is Accumulator}

    def cancel(self, step: int, reason: BaseException) -> None:
        """Fail what the aborted step waits for here. When this returns, nothing here touches that step's memory."""
        for waiting in self._all_waiting():
            waiting.cancel(step, reason)

    def abort(self, reason: BaseException) -> None:
        """Fail all waits, now and later, as when the task shuts down. Variables stay readable. The first reason wins."""
        with self._guard:
            if self._reason is None:
                self._reason = reason
        for waiting in self._all_waiting():
            waiting.abort(reason)

    def clear(self, container: str = "") -> None:
        """Forget everything in a container; those who wait fail."""
        with self._guard:
            gone = self._containers.pop(container, None)
        reason = StepAbortedError(f"container {container!r} was cleared")
        for waiting in gone.waiting.values() if gone else ():
            waiting.abort(reason)

    def _closed(self, container: str) -> Any:
        with self._guard:
            gate = self._container(container).gate
        return gate.closed()

    def _container(self, name: str) -> _Container:
        # The caller holds the guard.
        return self._containers.setdefault(name, _Container())

    def _record(self, container: str, name: str, spec: TensorSpec) -> _Variable:
        with self._guard:
            inside = self._container(container)
            record = inside.variables.get(name)
            if record is None:
                record = inside.variables[name] = _Variable(spec, UpdateLock(inside.gate), threading.Lock())
        _check_spec(name, container, record.spec, spec)
        return record

    def _allocate(self, spec: TensorSpec, name: str) -> np.ndarray:
        return np.empty(spec.shape, spec.dtype) if self.arena is None else self.arena.tensor(spec, name)

    def _find(self, container: str, kind: type[W], name: str) -> W | None:
        with self._guard:
            return self._container(container).waiting.get((kind, name))

    def _find_or_add(self, container: str, kind: type[W], name: str, make: Callable[[], W]) -> W:
        with self._guard:
            waiting = self._container(container).waiting
            found = waiting.get((kind, name))
            if found is None:
                found = waiting[kind, name] = make()
                if self._reason is not None:
                    found.abort(self._reason)
            assert isinstance(found, kind)
            return found

    def _all_waiting(self) -> list[_Waiting]:
        with self._guard:
            return [found for inside in self._containers.values() for found in inside.waiting.values()]


def _check_spec(name: str, container: str, present: TensorSpec, wanted: TensorSpec) -> None:
    if present != wanted:
        where = f" of container {container!r}" if container else ""
        raise ShapeError(f"variable {name}{where} is {present}, not {wanted}")
