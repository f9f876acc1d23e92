"""Executor: runs the compiled calls of one partition, one step after the other."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Mapping
from operator import length_hint

import numpy as np

from runtime.deadline import Deadline
from runtime.errors import (
    DeadlineError,
    GraphError,
    ShapeError,
    StepAbortedError,
    TransportError,
    UnknownGraphError,
    VerbflowError,
)
from runtime.execution.rendezvous import Edge, Rendezvous, step_aborted
from runtime.execution.segment import Arrival, Segment
from runtime.execution.state import StepState
from runtime.future import Future
from runtime.graph.ops import Call
from runtime.memory.arena import POISON, Arena, Block
from runtime.memory.plan import MemoryPlan
from runtime.tensor import TensorSpec
from runtime.trace import Phase, Tracer


class Executor:
    """One partition, compiled by ``compile_partition``. Steps run one at a time, on the thread that calls ``run``.

    A step that failed after it had begun to exchange tensors leaves memory that a peer may still read or write, so the
    executor is ``broken`` from then on; its graph is registered anew, with slots of its own.
    """

    def __init__(
        self,
        *,
        segments: list[Segment],
        state: StepState,
        arrivals: list[Arrival],
        event_names: list[str],
        finishes: list[int],
        kept: list[Edge],
        feeds: dict[str, np.ndarray],
        fetches: list[tuple[str, np.ndarray]],
        plan: MemoryPlan,
        heap: Arena,
        arena: Arena | None,
        blocks: list[Block],
        tracer: Tracer,
        poison: np.ndarray | None,
        cancel: Callable[[int, BaseException], None] | None,
    ) -> None:
        self.plan = plan
        self.broken = ""  # why no step can run any more
        self._segments = segments
        self._state = state
        self._arrivals = arrivals
        self._event_names = event_names
        self._must_finish = frozenset((*finishes, *(arrival.event for arrival in arrivals)))
        self._kept = kept
        self._feeds = feeds
        self._fetches = fetches
        self._heap = heap
        self._arena = arena
        self._blocks = blocks
        self._tracer = tracer
        self._poison = poison
        self._cancel = cancel
        self._running = threading.Lock()
        self._pending = [len(segment.before) + len(segment.events) for segment in segments]
        self._first = [number for number, count in enumerate(self._pending) if not count]
        self._after: list[list[int]] = [[] for _ in segments]
        self._on_event: list[list[int]] = [[] for _ in event_names]
        for number, segment in enumerate(segments):
            for before in segment.before:
                self._after[before].append(number)
            for event in segment.events:
                self._on_event[event].append(number)
        self._straight = not event_names and len(segments) <= 1
        self._calls: list[Call] = segments[0].calls if segments else []

    @property
    def feeds(self) -> dict[str, TensorSpec]:
        """Placeholders by node name, all of which a step must feed."""
        return {name: TensorSpec.of(array) for name, array in self._feeds.items()}

    @property
    def recv_slots(self) -> dict[int, np.ndarray]:
        """Destinations of received tensors by edge id, for ``Transport.offer``. They stay where they are until ``close``."""
        return {arrival.edge.id: arrival.into for arrival in self._arrivals}

    @property
    def resident_bytes(self) -> int:
        """Bytes of memory that this executor needs, shared ones (constants, variables) included."""
        return self.plan.total_bytes

    def run(
        self,
        step: int,
        rendezvous: Rendezvous | None = None,
        feeds: Mapping[str, object] | None = None,
        deadline: Deadline | None = None,
        *,
        copy: bool = True,
    ) -> list[np.ndarray]:
        """Run one step and return the fetched arrays in the order of ``compile_partition``'s ``fetches``.

        Feeds are copied into the placeholders. ``copy=False`` returns read-only views, valid until the next step or ``close``.
        The first error aborts ``rendezvous`` and is raised: the peer's or the kernel's own, GraphError or ShapeError for
        feeds, DeadlineError with the tensor, peer and path that did not answer, StepAbortedError if another part of the
        step failed first. Only one thread at a time.
        """
        if not self._running.acquire(blocking=False):
            raise GraphError("this executor runs a step already; steps of one registered graph are sequential")
        try:
            if self.broken:
                raise UnknownGraphError(f"register the graph again: {self.broken}")
            state = self._state
            state.begin(step, rendezvous, deadline or _FOREVER)
            try:
                pairs = self._checked(feeds)
                if self._straight and not self._tracer.enabled:
                    if state.in_flight:
                        self._settle()
                    self._feed(pairs)
                    self._run_calls(self._calls)
                    return self._results(copy)
                return self._run_step(pairs, copy)
            except BaseException as error:
                self._fail(error)
                raise
        finally:
            self._running.release()

    def close(self) -> None:
        """Free all memory. The edges' slots must be withdrawn from transports before. Idempotent."""
        self._segments, self._calls, self._arrivals = [], [], []
        self._feeds, self._fetches, self._poison = {}, [], None
        self._state = StepState()  # what the last step watched refers to slots
        self._cancel = None  # refers to variables
        self.broken = self.broken or "it was closed"
        blocks, self._blocks = self._blocks, []
        for block in blocks:
            assert self._arena is not None
            self._arena.free(block)
        self._heap.close()

    # Feeds and fetches

    def _checked(self, feeds: Mapping[str, object] | None) -> list[tuple[np.ndarray, np.ndarray]]:
        """Pairs (placeholder's memory, value); GraphError or ShapeError if the feeds are not what the step needs."""
        targets = self._feeds
        given = feeds or {}
        if len(given) != len(targets) or given.keys() != targets.keys():
            self._wrong_feeds(given)
        pairs = []
        for name, target in targets.items():
            value = given[name]
            if not isinstance(value, np.ndarray) or value.shape != target.shape or value.dtype != target.dtype:
                value = fed_array(name, value, TensorSpec.of(target))
            pairs.append((target, value))
        return pairs

    def _feed(self, pairs: list[tuple[np.ndarray, np.ndarray]]) -> None:
        if self._poison is not None:
            self._poison.fill(POISON)
        for target, value in pairs:
            np.copyto(target, value)

    def _wrong_feeds(self, given: Mapping[str, object]) -> None:
        missing = [name for name in self._feeds if name not in given]
        unknown = [name for name in given if name not in self._feeds]
        if missing:
            raise GraphError(f"placeholders must be fed and were not: {', '.join(missing)}")
        raise GraphError(
            f"fed, but no placeholder that this step reads: {', '.join(unknown)}; "
            f"it reads: {', '.join(self._feeds) or 'none'}"
        )

    def _results(self, copy: bool) -> list[np.ndarray]:
        if copy:
            results = [array.copy() for _, array in self._fetches]
        else:
            results = []
            for _, array in self._fetches:
                view = array.view()
                view.flags.writeable = False
                results.append(view)
        if self._kept:
            rendezvous = self._state.rendezvous
            assert rendezvous is not None
            if not copy:
                results = [array.copy() for array in results]
            for edge in self._kept:
                rendezvous.consumed(edge)
        return results

    # The step

    def _run_calls(self, calls: list[Call]) -> None:
        left = iter(calls)
        try:
            for call in left:
                call()
        except Exception as error:
            at = len(calls) - length_hint(left) - 1
            raise self._translated(error, calls, at) from error

    def _settle(self) -> None:
        """Wait until the step before has let go of what it sent: this step writes to the same memory."""
        state = self._state
        in_flight = [release for release in state.in_flight if not release.done()]
        state.in_flight = []
        if in_flight and not state.drain(in_flight):
            state.in_flight = in_flight
            raise state.deadline.error(f"{len(in_flight)} tensors sent in the step before are still being read")

    def _run_step(self, pairs: list[tuple[np.ndarray, np.ndarray]], copy: bool) -> list[np.ndarray]:
        state = self._state
        trace = _Trace(self._tracer, state.id) if self._tracer.enabled else None
        rendezvous = state.rendezvous
        # All Recvs start now, so that transfers overlap whatever can run.
        if self._arrivals:
            assert rendezvous is not None, "a partition with cut edges needs a rendezvous"
            state.receiving = True
            for arrival in self._arrivals:
                state.watch(arrival.event, rendezvous.recv(arrival.edge, arrival.into))
        if state.in_flight:
            self._settle()
        self._feed(pairs)
        if trace is not None:
            trace.mark(Phase.COPY, "feeds")
        pending = self._pending.copy()
        ready = self._first.copy()
        left = len(self._segments)
        unfinished = len(self._must_finish)
        inbox, segments = state.inbox, self._segments
        while True:
            while inbox:
                event, future = state.take()
                self._check(event, future)
                if event in self._must_finish:
                    unfinished -= 1
                for number in self._on_event[event]:
                    pending[number] -= 1
                    if not pending[number]:
                        heapq.heappush(ready, number)
            if ready:
                number = heapq.heappop(ready)
                if trace is None:
                    self._run_calls(segments[number].calls)
                else:
                    self._run_traced(segments[number], trace)
                left -= 1
                for later in self._after[number]:
                    pending[later] -= 1
                    if not pending[later]:
                        heapq.heappush(ready, later)
            elif left or unfinished:
                if not inbox and not state.wait():
                    raise self._late()
                if trace is not None:
                    trace.mark(Phase.WIRE, "wait")
            else:
                results = self._results(copy)
                if trace is not None:
                    trace.mark(Phase.COPY, "fetches")
                return results

    def _run_traced(self, segment: Segment, trace: _Trace) -> None:
        trace.mark(Phase.OTHER, "schedule")
        for at, (call, label) in enumerate(zip(segment.calls, segment.labels, strict=True)):
            try:
                call()
            except Exception as error:
                raise self._translated(error, segment.calls, at) from error
            trace.mark(label.phase, label.name, label.nbytes)

    # Errors

    def _check(self, event: int, future: Future) -> None:
        error = future.exception(self._state.deadline)
        if error is None:
            return
        arrival = next((arrival for arrival in self._arrivals if arrival.event == event), None)
        if arrival is None or isinstance(error, StepAbortedError):
            raise error
        rendezvous = self._state.rendezvous
        assert rendezvous is not None
        what, state = rendezvous.describe(arrival.edge), rendezvous.peer_state(arrival.edge)
        note = f"; {state}" if state else ""
        if isinstance(error, DeadlineError):
            raise DeadlineError(f"{self._state.deadline.error(what)}{note}") from error
        if isinstance(error, TransportError):
            waited = self._state.deadline.elapsed()
            raise type(error)(f"{what} failed after {waited:.1f} s: {error}{note}") from error
        raise error

    def _late(self) -> BaseException:
        """The deadline has passed: name what the earliest of the waiting segments waits for."""
        state = self._state
        waiting = sorted(state.watched, key=lambda event: self._on_event[event][:1] or [len(self._segments)])
        more = f" (and {len(waiting) - 1} more)" if len(waiting) > 1 else ""
        for arrival in self._arrivals:
            if waiting and arrival.event == waiting[0]:
                assert state.rendezvous is not None
                peer = state.rendezvous.peer_state(arrival.edge)
                error = state.deadline.error(f"{state.rendezvous.describe(arrival.edge)}{more}")
                return DeadlineError(f"{error}; {peer}") if peer else error
        what = f"{self._event_names[waiting[0]]} waits for {state.watched[waiting[0]].what}" if waiting else "the step"
        return state.deadline.error(f"{what}{more}")

    def _translated(self, error: Exception, calls: list[Call], at: int) -> Exception:
        if isinstance(error, VerbflowError):
            return error
        segment = next((segment for segment in self._segments if segment.calls is calls), None)
        name = segment.labels[at].name if segment is not None else "?"
        return GraphError(f"node {name} failed: {type(error).__name__}: {error}")

    def _fail(self, error: BaseException) -> None:
        """Give the step up everywhere, and this executor too if its memory may still be read or written by others."""
        state = self._state
        if state.rendezvous is not None:
            state.rendezvous.abort(error)
        if self._cancel is not None:
            self._cancel(state.id, step_aborted(state.id, error))
        outstanding = (*state.watched.values(), *state.in_flight)
        if state.receiving or any(not future.done() for future in outstanding):
            self.broken = f"its last step failed ({error})"
        # The error refers to this frame, and through it to all memory: it must not be kept from here.
        state.rendezvous = None
        state.forget()


_FOREVER = Deadline.after(10 * 365 * 86400.0)


class _Trace:
    """Tiles a step with spans on one thread: each begins where the last ended, so that they sum to the step."""

    def __init__(self, tracer: Tracer, step: int) -> None:
        self._tracer = tracer
        self._step = step
        self._last = time.monotonic_ns()

    def mark(self, phase: Phase, name: str, nbytes: int = 0) -> None:
        """End the current span here and say what it was."""
        now = time.monotonic_ns()
        self._tracer.record(phase, name, self._step, self._last, now, nbytes)
        self._last = now


def fed_array(name: str, value: object, spec: TensorSpec) -> np.ndarray:
    """What is fed to placeholder ``name`` as an array of ``spec``: numbers and lists take its dtype where they keep their values
    but for precision, arrays must have it. ShapeError otherwise."""
    if not isinstance(value, np.ndarray):
        try:
            given = np.asarray(value)
            if given.dtype.kind in "fc" and not np.can_cast(given.dtype, spec.dtype, "same_kind"):
                raise TypeError(f"{given.dtype.name} would be cut off")
            value = np.asarray(value, spec.dtype)
        except (TypeError, ValueError, OverflowError) as error:
            raise ShapeError(f"placeholder {name} is {spec}; what was fed is no array of it: {error}") from None
    if value.shape != spec.shape or value.dtype != spec.dtype:
        raise ShapeError(
            f"placeholder {name} is {spec}, fed was {value.dtype.name}[{', '.join(map(str, value.shape))}]"
        )
    return value
