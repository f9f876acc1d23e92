"""One case or more for every op that has a gradient; ``test_gradients`` compares each with finite differences in float64.

A new op's cases go into CASES under its registered name; the test fails for an op that has a gradient and no case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from runtime.graph import array_ops as ops
from runtime.graph import nn_ops
from runtime.graph.graph import Output
from runtime.graph.state_ops import read_variable, variable


@dataclass(frozen=True)
class Case:
    """``build`` makes the op from one placeholder for each of ``inputs``; floating inputs are differentiated by."""

    build: Callable[..., Output | Sequence[Output]]
    inputs: tuple[np.ndarray, ...]
    tolerance: float = 1e-6


def numbers(*shape: int, seed: int = 0, low: float = -2.0, high: float = 2.0) -> np.ndarray:
    """Random float64, at least 0.01 apart from each other and from zero, so that kinks and ties are never near."""
    count = int(np.prod(shape))
    grid = np.linspace(low, high, 2 * count + 2) + 0.0071
    return np.random.default_rng(seed).permutation(grid)[:count].reshape(shape)


def positive(*shape: int, seed: int = 0) -> np.ndarray:
    return numbers(*shape, seed=seed, low=0.3, high=3.0)


A, B, ROW, COLUMN = numbers(3, 4), numbers(3, 4, seed=1), numbers(4, seed=2), numbers(3, 1, seed=3)
MASK = np.array([[True, False, True, False]] * 3)


def _plus_variable(x: Output) -> Output:
    with x.graph.as_default():
        return read_variable(variable("zero", x.shape, np.float64)) + x


def _matmul(transpose_a: bool, transpose_b: bool) -> Case:
    a, b = numbers(3, 4), numbers(4, 5, seed=1)
    return Case(
        lambda x, y: ops.matmul(x, y, transpose_a=transpose_a, transpose_b=transpose_b),
        (a.T.copy() if transpose_a else a, b.T.copy() if transpose_b else b),
    )


IMAGES, FILTER = numbers(2, 5, 4, 3, seed=4), numbers(3, 2, 3, 2, seed=5)
# Stride and padding: plain, SAME with an odd rest, a stride that leaves pixels out, padding wider than the kernel.
GEOMETRIES: tuple[tuple[Any, Any], ...] = ((1, "VALID"), (1, "SAME"), ((2, 1), (0, 1, 2, 1)), (3, "VALID"), (1, 3))


def _conv(build: Callable[..., Output], *inputs: np.ndarray) -> list[Case]:
    return [Case(partial(build, stride=stride, padding=padding), inputs) for stride, padding in GEOMETRIES]


def _input_gradient(w: Output, stride: Any, padding: Any) -> Output:
    """Conv2DBackpropInput of the output's gradient that a convolution of ones has."""
    return _backprop("Conv2DBackpropInput", ops.constant(np.ones(IMAGES.shape)), w, w, IMAGES.shape, stride, padding)


def _filter_gradient(x: Output, stride: Any, padding: Any) -> Output:
    return _backprop("Conv2DBackpropFilter", x, ops.constant(np.ones(FILTER.shape)), x, FILTER.shape, stride, padding)


def _backprop(op: str, x: Output, w: Output, by: Output, shape: Any, stride: Any, padding: Any) -> Output:
    y = nn_ops.conv2d(x, w, stride, padding)
    return by.graph.add(op, by, y * y, shape=shape, stride=y.node.attrs["stride"], padding=y.node.attrs["padding"]).out


def _avg_pool_gradient(y: Output) -> Output:
    kinds: dict[str, Any] = {"kernel": (3, 2), "stride": (2, 2), "padding": (1, 1, 0, 0)}
    return y.graph.add("AvgPoolGrad", y, shape=IMAGES.shape, **kinds).out


def _dropout_gradient(x: Output) -> Output:
    mask = ops.constant(np.array([[True, False, True, True]] * 3))
    return x.graph.add("DropoutGrad", x, mask, rate=0.25).out


def _lstm(which: slice) -> Callable[..., Sequence[Output]]:
    return lambda gates, cell: list(nn_ops.lstm_cell(gates, cell))[which]


CASES: dict[str, list[Case]] = {
    "Abs": [Case(ops.abs_, (A,))],
    "Add": [Case(ops.add, (A, B)), Case(ops.add, (A, ROW)), Case(ops.add, (COLUMN, ROW))],
    "AddN": [Case(lambda *x: ops.add_n(x), (A, B, A * B)), Case(lambda x: ops.add_n([x]), (A,))],
    "AvgPool": [
        Case(lambda x: nn_ops.avg_pool(x, 2), (IMAGES,)),
        Case(lambda x: nn_ops.avg_pool(x, (3, 2), (2, 1), "SAME"), (IMAGES,)),
        Case(lambda x: nn_ops.avg_pool(x, 1, 2), (IMAGES,)),
        Case(nn_ops.global_avg_pool, (IMAGES,)),
    ],
    "AvgPoolGrad": [Case(_avg_pool_gradient, (numbers(2, 3, 2, 3),))],
    "BatchNorm": [
        Case(lambda x, g, b: nn_ops.batch_norm(x, g, b)[0], (IMAGES, positive(3), numbers(3)), 1e-5),
        Case(lambda x, g, b: nn_ops.batch_norm(x, g, b, 0.1)[0], (A, positive(4), ROW), 1e-5),
    ],
    "BiasAdd": [
        Case(nn_ops.bias_add, (IMAGES, numbers(3))),
        Case(lambda x, b: nn_ops.bias_add(x, b, relu=True), (A, ROW + 0.003)),
    ],
    "BiasAddGrad": [Case(lambda x: x.graph.add("BiasAddGrad", x).out, (IMAGES,))],
    "BroadcastTo": [
        Case(lambda x: ops.broadcast_to(x, (3, 4)), (ROW,)),
        Case(lambda x: ops.broadcast_to(x, (2, 3, 4)), (COLUMN,)),
    ],
    "Cast": [Case(lambda x: ops.cast(ops.cast(x * 3.0, np.float32), np.float64), (A,), 2e-2)],
    "Concat": [Case(lambda x, y: ops.concat([x, y, x], 1), (A, COLUMN)), Case(lambda x: ops.concat([x], -1), (A,))],
    "Conv2D": _conv(nn_ops.conv2d, IMAGES, FILTER),
    "Conv2DBackpropFilter": _conv(_filter_gradient, IMAGES),
    "Conv2DBackpropInput": _conv(_input_gradient, FILTER),
    "Div": [Case(ops.div, (A, positive(3, 4))), Case(ops.div, (ROW, positive(3, 1)))],
    "Dropout": [Case(lambda x: nn_ops.dropout(x, 0.4, seed=3), (A,))],
    "DropoutGrad": [Case(_dropout_gradient, (A,))],
    "Exp": [Case(ops.exp, (A,))],
    "Gather": [
        Case(ops.gather, (numbers(5, 3), np.array([4, 0, 4, 2]))),
        Case(ops.gather, (numbers(5), np.array([[4, 0], [4, 2]]))),
        Case(ops.gather, (numbers(5, 2, 2), np.array(3))),
    ],
    "GatherGrad": [
        Case(
            lambda rows, x: x.graph.add("GatherGrad", rows, x, rows=5).out,
            (np.array([1, 1, 4]), numbers(3, 2)),
        )
    ],
    "Identity": [Case(ops.identity, (A,))],
    "InTopK": [
        Case(
            lambda x, labels: ops.select(nn_ops.in_top_k(x, labels), 2.0, ops.reduce_sum(x, 1)),
            (A, np.array([3, 0, 1])),
        )
    ],
    "LSTMGates": [
        Case(_lstm(slice(0, 2)), (numbers(3, 8), numbers(3, 2, seed=1))),
        Case(_lstm(slice(0, 1)), (numbers(3, 8), numbers(3, 2, seed=1))),
        Case(_lstm(slice(1, 2)), (numbers(3, 8), numbers(3, 2, seed=1))),
    ],
    "LocalResponseNorm": [
        Case(nn_ops.local_response_norm, (IMAGES,)),
        Case(lambda x: nn_ops.local_response_norm(x, 1, 1.0, 0.5, 0.7), (numbers(4, 7),)),
        Case(lambda x: nn_ops.local_response_norm(x, 9, 1.0, 0.5, 0.7), (A,)),
    ],
    "Log": [Case(ops.log, (positive(3, 4),))],
    "MatMul": [_matmul(a, b) for a in (False, True) for b in (False, True)]
    + [Case(lambda x: ops.matmul(x, x, transpose_a=True), (A,))],
    "MaxPool": [
        Case(lambda x: nn_ops.max_pool(x, 2), (IMAGES,)),
        Case(lambda x: nn_ops.max_pool(x, 3, 2), (numbers(2, 7, 6, 2),)),
        Case(lambda x: nn_ops.max_pool(x, (3, 2), (1, 2), "SAME"), (IMAGES,)),
        Case(lambda x: nn_ops.max_pool(x, 2, 3), (IMAGES,)),
        Case(lambda x: nn_ops.max_pool(x, 3, 2, 1), (IMAGES,)),
    ],
    "Maximum": [Case(ops.maximum, (A, B + 0.003)), Case(ops.maximum, (A, ROW + 0.005))],
    "Minimum": [Case(ops.minimum, (A, B + 0.003)), Case(ops.minimum, (COLUMN, ROW + 0.005))],
    "Mul": [Case(ops.mul, (A, B)), Case(ops.mul, (A, COLUMN)), Case(lambda x: x * x, (A,))],
    "Neg": [Case(ops.neg, (A,))],
    "Pad": [Case(lambda x: ops.pad(x, [(1, 0), (2, 3)]), (A,))],
    "ReadVariable": [Case(_plus_variable, (A,))],
    "ReduceMax": [
        Case(ops.reduce_max, (A,)),
        Case(lambda x: ops.reduce_max(x, 1), (A,)),
        Case(lambda x: ops.reduce_max(x, (0, 2), keepdims=True), (numbers(2, 3, 4),)),
    ],
    "ReduceMean": [
        Case(ops.reduce_mean, (A,)),
        Case(lambda x: ops.reduce_mean(x, -1), (A,)),
        Case(lambda x: ops.reduce_mean(x, (0, 2), keepdims=True), (numbers(2, 3, 4),)),
    ],
    "ReduceSum": [
        Case(ops.reduce_sum, (A,)),
        Case(lambda x: ops.reduce_sum(x, 0), (A,)),
        Case(lambda x: ops.reduce_sum(x, ()), (A,)),
        Case(lambda x: ops.reduce_sum(x, (0, -1)), (numbers(2, 3, 4),)),
    ],
    "Relu": [Case(nn_ops.relu, (A,))],
    "ReluGrad": [Case(lambda x: x.graph.add("ReluGrad", ops.constant(B), x).out, (A,))],
    "Reshape": [Case(lambda x: ops.reshape(x, (2, -1)), (A,))],
    "Select": [
        Case(ops.select, (MASK, A, B)),
        Case(ops.select, (MASK, ROW, COLUMN)),
    ],
    "Sigmoid": [Case(ops.sigmoid, (A,))],
    "Slice": [Case(lambda x: ops.slice_(x, (1, 1), (2, -1)), (A,))],
    "Softmax": [Case(nn_ops.softmax, (A,)), Case(nn_ops.softmax, (IMAGES,))],
    "SparseSoftmaxCrossEntropy": [
        Case(nn_ops.sparse_softmax_cross_entropy, (A, np.array([3, 0, 1]))),
        Case(lambda x, labels: x.graph.add("SparseSoftmaxCrossEntropy", x, labels).outputs, (A, np.array([3, 0, 1]))),
    ],
    "Split": [
        Case(lambda x: ops.split(x, 2, 1), (A,)),
        Case(lambda x: ops.split(x, (1, 2), 0)[1], (A,)),
    ],
    "Sqrt": [Case(ops.sqrt, (positive(3, 4),))],
    "Square": [Case(ops.square, (A,))],
    "StopGradient": [Case(lambda x: ops.stop_gradient(ops.square(x)) * 0.0 + x, (A,))],
    "Sub": [Case(ops.sub, (A, B)), Case(ops.sub, (ROW, A))],
    "SumTo": [
        Case(lambda x: ops.sum_to_shape(x, (4,)), (A,)),
        Case(lambda x: ops.sum_to_shape(x, (2, 1, 4)), (numbers(2, 3, 4),)),
        Case(lambda x: ops.sum_to_shape(x, ()), (A,)),
    ],
    "SyntheticCompute": [
        Case(lambda x: x.graph.add("SyntheticCompute", x, seconds=0.0, gradient_seconds=0.0).out, (np.array(0.7),))
    ],
    "Tanh": [Case(ops.tanh, (A,))],
    "Transpose": [
        Case(ops.transpose, (A,)),
        Case(lambda x: ops.transpose(x, (1, 2, 0)), (numbers(2, 3, 4),)),
    ],
}
