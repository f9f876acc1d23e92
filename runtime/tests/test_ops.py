"""Ops: values against numpy's own, kernels that write where they are told, and what may run in place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from runtime.errors import GraphError
from runtime.graph import array_ops as ops
from runtime.graph.gradients import gradients
from runtime.graph.graph import Graph, Output
from runtime.graph.ops import KernelContext, known_ops, op_class
from runtime.graph.optimize import prune
from runtime.tests.gradient_cases import CASES, Case, numbers, positive
from runtime.tests.interpreter import evaluate

A, B, ROW = numbers(3, 4), numbers(3, 4, seed=1), numbers(4, seed=2)
COUNTS, MORE = np.array([[3, -2, 0]] * 2, np.int32), np.array([1, -2, 7], np.int32)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


VALUES: list[tuple[str, Any, Any, tuple[np.ndarray, ...]]] = [
    ("add", ops.add, np.add, (A, ROW)),
    ("add int", ops.add, np.add, (COUNTS, MORE)),
    ("sub", ops.sub, np.subtract, (A, B)),
    ("mul", ops.mul, np.multiply, (A, ROW)),
    ("div", ops.div, np.divide, (A, positive(3, 4))),
    ("maximum", ops.maximum, np.maximum, (A, ROW)),
    ("minimum int", ops.minimum, np.minimum, (COUNTS, MORE)),
    ("neg", ops.neg, np.negative, (A,)),
    ("abs", ops.abs_, np.abs, (COUNTS,)),
    ("exp", ops.exp, np.exp, (A,)),
    ("log", ops.log, np.log, (positive(3, 4),)),
    ("sqrt", ops.sqrt, np.sqrt, (positive(3, 4),)),
    ("square", ops.square, np.square, (COUNTS,)),
    ("tanh", ops.tanh, np.tanh, (A,)),
    ("sigmoid", ops.sigmoid, _sigmoid, (A,)),
    ("add_n", lambda *x: ops.add_n(x), lambda a, b, c: a + b + c, (A, B, A)),
    ("equal", ops.equal, np.equal, (COUNTS, MORE)),
    ("not_equal", ops.not_equal, np.not_equal, (COUNTS, MORE)),
    ("less", ops.less, np.less, (A, ROW)),
    ("less_equal", ops.less_equal, np.less_equal, (COUNTS, MORE)),
    ("greater", ops.greater, np.greater, (A, ROW)),
    ("greater_equal", ops.greater_equal, np.greater_equal, (COUNTS, MORE)),
    ("select", ops.select, np.where, (A > 0, A, ROW)),
    ("cast", lambda x: ops.cast(x, np.int32), lambda x: x.astype(np.int32), (A * 3,)),
    ("cast up", lambda x: ops.cast(x, np.float64), lambda x: x.astype(np.float64), (COUNTS,)),
    ("matmul", ops.matmul, np.matmul, (A, B.T.copy())),
    ("matmul int", ops.matmul, np.matmul, (COUNTS, MORE.reshape(3, 1))),
    ("matmul empty", ops.matmul, np.matmul, (A[:, :0].copy(), B[:0].copy())),
    ("gram", lambda x: ops.matmul(x, x, transpose_b=True), lambda x: x @ x.T, (A,)),
    ("sum", ops.reduce_sum, np.sum, (A,)),
    ("sum int", lambda x: ops.reduce_sum(x, 0), lambda x: x.sum(0, dtype=np.int32), (COUNTS,)),
    ("sum empty", lambda x: ops.reduce_sum(x, 0), lambda x: x.sum(0), (A[:0].copy(),)),
    ("mean", lambda x: ops.reduce_mean(x, 1, True), lambda x: x.mean(1, keepdims=True), (A,)),
    ("max", lambda x: ops.reduce_max(x, 0), lambda x: x.max(0), (A,)),
    ("sum_to", lambda x: ops.sum_to_shape(x, (3, 1)), lambda x: x.sum(1, keepdims=True), (A,)),
    ("argmax", lambda x: ops.argmax(x, 0), lambda x: x.argmax(0), (A,)),
    ("reshape", lambda x: ops.reshape(x, (-1, 2)), lambda x: x.reshape(-1, 2), (A,)),
    ("transpose", ops.transpose, np.transpose, (A,)),
    ("broadcast", lambda x: ops.broadcast_to(x, (2, 4)), lambda x: np.broadcast_to(x, (2, 4)), (ROW,)),
    ("concat", lambda x, y: ops.concat([x, y], 0), lambda x, y: np.concatenate([x, y]), (A, B)),
    ("slice", lambda x: ops.slice_(x, (1, 0), (-1, 2)), lambda x: x[1:, :2], (A,)),
    ("pad", lambda x: ops.pad(x, [(1, 2), (0, 1)]), lambda x: np.pad(x, [(1, 2), (0, 1)]), (A,)),
    ("gather", ops.gather, lambda t, i: t[i], (A, np.array([[2, 0], [2, 2]]))),
    ("one_hot", lambda x: ops.one_hot(x, 3), lambda x: (x[:, None] == np.arange(3)).astype(np.float32), (MORE,)),
    ("one_hot wide", lambda x: ops.one_hot(x, 300, np.float64), lambda x: np.eye(300)[x], (MORE.astype(np.uint8) % 7,)),
    ("zeros_like", ops.zeros_like, np.zeros_like, (A,)),
    ("ones_like", ops.ones_like, np.ones_like, (COUNTS,)),
    ("identity", ops.identity, np.array, (A,)),
]


@pytest.mark.parametrize(("build", "reference", "inputs"), [pytest.param(*row[1:], id=row[0]) for row in VALUES])
def test_values_are_numpys(build: Any, reference: Any, inputs: tuple[np.ndarray, ...]) -> None:
    graph = Graph()
    with graph.as_default():
        out = build(*[ops.placeholder(value.shape, value.dtype, f"x{at}") for at, value in enumerate(inputs)])
    (got,) = evaluate(graph, [out], {f"x{at}": value for at, value in enumerate(inputs)})
    wanted = np.asarray(reference(*inputs))
    assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype) and out.spec.shape == got.shape
    np.testing.assert_allclose(got, wanted, 1e-12, 1e-12)


def _nodes() -> list[Any]:
    found: dict[str, tuple[Graph, Case]] = {}
    for cases in CASES.values():
        graph = Graph()
        with graph.as_default():
            inputs = [ops.placeholder(value.shape, value.dtype, f"x{at}") for at, value in enumerate(cases[0].inputs)]
            built = cases[0].build(*inputs)
            if isinstance(built, Output):
                gradients(ops.reduce_sum(built), [value for value in inputs if value.dtype.kind == "f"])
        for node in graph.nodes:
            if node.op.inplace:
                found.setdefault(node.op.name, (graph, cases[0]))
    return [pytest.param(name, *pair, id=name) for name, pair in sorted(found.items())]


@pytest.mark.parametrize(("name", "graph", "case"), _nodes())
def test_running_in_place_gives_the_same_bits(name: str, graph: Graph, case: Case) -> None:
    node = next(node for node in graph.nodes if node.op.name == name)
    feeds = {f"x{at}": value for at, value in enumerate(case.inputs)}
    values = dict(zip(node.inputs, evaluate(graph, node.inputs, feeds)))
    for source, target in node.op.inplace:
        if node.inputs[source].spec != node.specs[target]:
            continue
        results = []
        for inplace in (False, True):
            inputs = [values[value].copy() for value in node.inputs]
            outputs = [np.empty(spec.shape, spec.dtype) for spec in node.specs]
            if inplace:
                outputs[target] = inputs[source]
            nbytes = node.op.workspace([value.spec for value in node.inputs], node.attrs, 1)
            context = KernelContext(np.empty(nbytes, np.uint8), None, 1, node.name, SimpleNamespace(id=1))
            call = node.op.compile(inputs, outputs, node.attrs, context)
            assert call is not None
            call()
            results.append([output.tobytes() for output in outputs])
        assert results[0] == results[1]


def test_sigmoid_does_not_overflow() -> None:
    graph = Graph()
    with graph.as_default():
        x = ops.placeholder((4,), name="x")
        y = ops.sigmoid(x)
    np.testing.assert_array_equal(evaluate(graph, [y], {"x": [-1e30, 0, 1e30, -100]})[0], [0, 0.5, 1, 0])


@pytest.mark.parametrize("indices", [[0, 5], [-1, 0]])
def test_gather_refuses_rows_that_are_not_there(indices: list[int]) -> None:
    graph = Graph()
    with graph.as_default():
        table = ops.constant(np.ones((5, 2)))
        rows = ops.placeholder((2,), np.int64, "rows")
        picked = ops.gather(table, rows, name="look_up")
        spread = graph.add("GatherGrad", rows, ops.constant(np.ones((2, 2))), rows=5, name="spread").out
    for value, name in ((picked, "look_up"), (spread, "spread")):
        with pytest.raises(GraphError, match=rf"node {name}: index -?\d or \d is not a row of a table of 5"):
            _only(graph, value, {"rows": indices})
    assert evaluate(graph, [picked], {"rows": [4, 0]})[0].sum() == 4


def _only(graph: Graph, value: Output, feeds: dict[str, Any]) -> None:
    rewrite = prune(graph, [value])
    evaluate(rewrite.graph, [rewrite.outputs[value]], feeds)


def test_product_with_itself_rounds_like_any_product() -> None:
    x = np.random.default_rng(0).standard_normal((64, 48)).astype(np.float32)
    graph = Graph()
    with graph.as_default():
        a = ops.placeholder(x.shape, name="a")
        b = ops.placeholder(x.shape, name="b")
        same, other = ops.matmul(a, a, transpose_a=True), ops.matmul(a, b, transpose_a=True)
    got = evaluate(graph, [same, other], {"a": x, "b": x})
    assert got[0].tobytes() == got[1].tobytes()


def test_costs() -> None:
    graph = Graph()
    with graph.as_default():
        x = ops.placeholder((8, 4), name="x")
        product = ops.matmul(x, x, transpose_b=True)
    for value, flops, nbytes in ((product, 2 * 8 * 8 * 4, 4 * (32 + 32 + 64)), (ops.reshape(x, (4, 8)), 0, 0)):
        cost = value.node.op.cost([i.spec for i in value.node.inputs], value.node.specs, value.node.attrs)
        assert (cost.flops, cost.nbytes) == (flops, nbytes)


def test_every_op_says_what_it_is() -> None:
    for name in known_ops():
        cls = op_class(name)
        if cls.resident:
            assert cls.memory is not op_class("NoOp").memory
        if cls.mutates or cls.asynchronous:
            assert cls.stateful, f"{name} would be merged with an equal node"
