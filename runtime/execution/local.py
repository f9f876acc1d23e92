"""LocalEngine: runs a whole graph in this process, without a cluster; what ``Session(graph)`` is made of.

The first run of a set of fetches prunes, optimises, orders, plans and compiles; later ones cost a dictionary look-up beside
the calls.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from runtime.deadline import Deadline
from runtime.errors import DeadlineError, GraphError
from runtime.execution.compile import compile_partition
from runtime.execution.executor import Executor
from runtime.execution.resources import Resources
from runtime.graph.fusion import fuse_updates
from runtime.graph.graph import Graph, Node, Output
from runtime.graph.optimize import optimise
from runtime.graph.partition import check_feeds, partition
from runtime.kernels import blas
from runtime.trace import Tracer

_DEVICE = "/job:local/task:0"
_DEFAULT_S = 3600.0


@dataclass(slots=True)
class _Signature:
    """A set of fetches as it is compiled now. ``places``: index of a fetch among the executor's results, None for a node."""

    executor: Executor | None
    feeds: list[str]
    places: list[int | None]
    guard: threading.Lock = field(default_factory=threading.Lock)


class LocalEngine:
    """Any thread may call it; runs of one set of fetches come one after the other, of several sets at the same time.

    Devices that nodes name are ignored: everything runs here. ``threads``: how many a kernel may use, by default as many as
    this process has cores. More than one means one BLAS thread for the whole process from then on, since kernels that share
    the cores themselves would be slowed down by BLAS's doing so too. ``poison`` is for tests: memory is overwritten when its
    content is used up.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        resources: Resources | None = None,
        threads: int | None = None,
        tracer: Tracer | None = None,
        poison: bool = False,
    ) -> None:
        self.graph = graph
        self.resources = resources if resources is not None else Resources()
        self.tracer = tracer if tracer is not None else Tracer(capacity=1)
        self._threads = threads if threads is not None else len(os.sched_getaffinity(0))
        if self._threads > 1:
            blas.set_threads(1)
        self._poison = poison
        self._steps = itertools.count(1)
        self._guard = threading.Lock()
        self._signatures: dict[tuple[object, ...], _Signature] = {}
        self._closed = False

    def run(
        self,
        fetches: Sequence[Output | Node],
        feeds: Mapping[Output, object] | None = None,
        deadline: Deadline | None = None,
    ) -> list[np.ndarray | None]:
        """Run what ``fetches`` need; values of outputs as arrays of the caller's own, None for nodes.

        ``feeds`` gives the placeholders' values; those that the fetches do not need are ignored. GraphError or ShapeError
        for what cannot be run; the variables are unchanged then.
        """
        if feeds:
            check_feeds(feeds)
            foreign = next((value for value in feeds if value.node.graph is not self.graph), None)
            if foreign is not None:
                raise GraphError(f"{foreign.name} belongs to another graph and cannot be fed to this one")
        if deadline is None:
            deadline = Deadline.after(_DEFAULT_S)
        signature = self._acquire(fetches, deadline)
        try:
            executor = signature.executor
            if executor is None:
                return [None] * len(fetches)
            given = {}
            if signature.feeds and feeds:
                by_name = {value.node.name: fed for value, fed in feeds.items()}
                given = {name: by_name[name] for name in signature.feeds if name in by_name}
            results = executor.run(next(self._steps), None, given, deadline)
        finally:
            signature.guard.release()
        return [None if place is None else results[place] for place in signature.places]

    def _acquire(self, fetches: Sequence[Output | Node], deadline: Deadline) -> _Signature:
        """The signature, its guard held; compiled anew if a step left its memory to others (a wait that did not end)."""
        while True:
            signature = self._signature(fetches)
            if not signature.guard.acquire(timeout=deadline.remaining()):
                raise DeadlineError(f"another thread still runs these fetches after {deadline.elapsed():.1f} s")
            if signature.executor is None or not signature.executor.broken:
                return signature
            signature.guard.release()
            self._forget(signature)

    def executor(self, fetches: Sequence[Output | Node]) -> Executor | None:
        """What ``fetches`` are compiled to, for its memory plan; None if there is nothing to run."""
        return self._signature(fetches).executor

    def close(self) -> None:
        """Free the compiled plans' memory; variables stay in ``resources``. Not while a step runs. Idempotent."""
        with self._guard:
            self._closed = True
            signatures = list(self._signatures.values())
            self._signatures.clear()
        for signature in signatures:
            with signature.guard:
                if signature.executor is not None:
                    signature.executor.close()

    def _signature(self, fetches: Sequence[Output | Node]) -> _Signature:
        key = tuple((id(fetch.node), fetch.index) if isinstance(fetch, Output) else id(fetch) for fetch in fetches)
        signature = self._signatures.get(key)
        if signature is None:
            with self._guard:
                if self._closed:
                    raise GraphError("this session is closed")
                signature = self._signatures.get(key)
                if signature is None:
                    signature = self._signatures[key] = self._compile(fetches)
        return signature

    def _compile(self, fetches: Sequence[Output | Node]) -> _Signature:
        outputs: list[Output] = []
        targets: list[Node] = []
        places: list[int | None] = []
        for fetch in fetches:
            if isinstance(fetch, Output):
                places.append(len(outputs))
                outputs.append(fetch)
            elif isinstance(fetch, Node):
                places.append(None)
                targets.append(fetch)
            else:
                raise GraphError(f"{fetch!r} cannot be fetched: it is neither an output nor a node of the graph")
        rewrite = optimise(self.graph, outputs, targets)
        rewrite = rewrite.then(
            fuse_updates(
                rewrite.graph,
                [rewrite.outputs[output] for output in outputs],
                [rewrite.nodes[target] for target in targets],
            )
        )
        outputs = [rewrite.outputs[output] for output in outputs]
        targets = [rewrite.nodes[node] for node in targets]
        # One part, but still cut: it is what puts reads and writes of variables into order.
        parts = partition(rewrite.graph, dict.fromkeys(rewrite.graph.nodes, _DEVICE), outputs, targets)
        if not parts:
            return _Signature(None, [], places)
        part = parts[_DEVICE]
        executor = compile_partition(
            part.graph,
            [part.fetches[output.name] for output in outputs],
            resources=self.resources,
            threads=self._threads,
            tracer=self.tracer,
            poison=self._poison,
        )
        return _Signature(executor, list(part.feeds), places)

    def _forget(self, signature: _Signature) -> None:
        """Compile these fetches anew at their next run."""
        with self._guard:
            for key in [key for key, known in self._signatures.items() if known is signature]:
                del self._signatures[key]
