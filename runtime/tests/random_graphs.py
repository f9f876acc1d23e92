"""Random graphs for property tests: pure ops, variables that are read and changed, devices and control edges at random."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from runtime.graph import array_ops as ops
from runtime.graph import state_ops as state
from runtime.graph.apply_ops import apply_momentum, apply_sgd
from runtime.graph.graph import Graph, Node, Output
from runtime.graph.initialisers import uniform

DEVICES = ("/job:ps/task:0", "/job:ps/task:1", "/job:worker/task:0", "/job:worker/task:1")
SIZE = 3
_UNARY: tuple[Callable[[Output], Output], ...] = (
    ops.tanh,
    ops.sigmoid,
    ops.neg,
    ops.square,
    ops.identity,
    ops.transpose,
    ops.stop_gradient,
    ops.abs_,
)
_BINARY: tuple[Callable[[Output, Output], Output], ...] = (ops.add, ops.sub, ops.mul, ops.matmul, ops.maximum)


@dataclass
class Drawn:
    """A graph of SIZE x SIZE matrices, values for its placeholders, and what to run."""

    graph: Graph
    feeds: dict[str, np.ndarray]
    fetches: list[Output]
    targets: list[Node] = field(default_factory=list)


@st.composite
def graphs(draw: st.DrawFn, mutation: bool = True, max_nodes: int = 25) -> Drawn:
    """``mutation``: with ops that change variables."""
    graph = Graph()
    device = st.sampled_from(DEVICES)
    generator = np.random.default_rng(draw(st.integers(0, 1000)))
    feeds: dict[str, np.ndarray] = {}
    pool: list[Output] = []
    variables: list[Output] = []
    changes: list[Node] = []
    with graph.as_default():
        for at in range(draw(st.integers(1, 3))):
            with graph.device(draw(device)):
                pool.append(ops.placeholder((SIZE, SIZE), name=f"x{at}"))
            feeds[f"x{at}"] = generator.uniform(-1, 1, (SIZE, SIZE)).astype(np.float32)
        for at in range(draw(st.integers(1, 3))):
            with graph.device(draw(device)):
                variables.append(state.variable(f"w{at}", (SIZE, SIZE), initialiser=uniform(-1, 1)))
        pool += variables
        for _ in range(draw(st.integers(1, max_nodes))):
            control = draw(st.lists(st.sampled_from(graph.nodes), max_size=2)) if draw(st.booleans()) else []
            with graph.device(draw(device)), graph.control_dependencies(control):
                kind = draw(st.integers(0, 9))
                a, b = draw(st.sampled_from(pool)), draw(st.sampled_from(pool))
                if kind < 3:
                    pool.append(draw(st.sampled_from(_UNARY))(a))
                elif kind < 6:
                    pool.append(draw(st.sampled_from(_BINARY))(a, b))
                elif kind == 6:
                    pool += [ops.concat(list(ops.split(a, (1, 2), 0)), 0), ops.add_n([a, b, a])]
                elif kind == 7:
                    pool.append(a + draw(st.sampled_from([0.5, 1.0])))
                elif mutation:
                    w = draw(st.sampled_from(variables))
                    change = draw(st.integers(0, 4))
                    if change == 0:
                        changes.append(apply_sgd(w, ops.tanh(a), 0.1))
                    elif change == 1:
                        changes.append(apply_momentum(w, ops.tanh(a), 0.1))
                    elif change == 2:
                        pool.append(state.assign(w, ops.tanh(a)))
                    elif change == 3:
                        pool.append(state.assign_add(w, ops.tanh(a)))
                    else:
                        pool.append(state.read_variable(w))
    # What is fetched is copied, because a fetch of live memory says nothing about when it was read.
    pure = [value for value in pool if not value.node.op.resident and not value.node.op.alias]
    fetches = draw(st.lists(st.sampled_from(pure), min_size=1, max_size=4, unique=True))
    targets = draw(st.lists(st.sampled_from(changes), max_size=4, unique=True)) if changes else []
    return Drawn(graph, feeds, fetches, targets)
