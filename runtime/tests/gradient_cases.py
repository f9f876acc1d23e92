"""One case or more for every op that has a gradient; ``test_gradients`` compares each with finite differences in float64.

A new op's cases go into CASES under its registered name; the test fails for an op that has a gradient and no case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from runtime.graph import array_ops as ops
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


CASES: dict[str, list[Case]] = {
    "Abs": [Case(ops.abs_, (A,))],
    "Add": [Case(ops.add, (A, B)), Case(ops.add, (A, ROW)), Case(ops.add, (COLUMN, ROW))],
    "AddN": [Case(lambda *x: ops.add_n(x), (A, B, A * B)), Case(lambda x: ops.add_n([x]), (A,))],
    "BroadcastTo": [
        Case(lambda x: ops.broadcast_to(x, (3, 4)), (ROW,)),
        Case(lambda x: ops.broadcast_to(x, (2, 3, 4)), (COLUMN,)),
    ],
    "Cast": [Case(lambda x: ops.cast(ops.cast(x * 3.0, np.float32), np.float64), (A,), 2e-2)],
    "Concat": [Case(lambda x, y: ops.concat([x, y, x], 1), (A, COLUMN)), Case(lambda x: ops.concat([x], -1), (A,))],
    "Div": [Case(ops.div, (A, positive(3, 4))), Case(ops.div, (ROW, positive(3, 1)))],
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
    "Log": [Case(ops.log, (positive(3, 4),))],
    "MatMul": [_matmul(a, b) for a in (False, True) for b in (False, True)]
    + [Case(lambda x: ops.matmul(x, x, transpose_a=True), (A,))],
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
    "Reshape": [Case(lambda x: ops.reshape(x, (2, -1)), (A,))],
    "Select": [
        Case(ops.select, (MASK, A, B)),
        Case(ops.select, (MASK, ROW, COLUMN)),
    ],
    "Sigmoid": [Case(ops.sigmoid, (A,))],
    "Slice": [Case(lambda x: ops.slice_(x, (1, 1), (2, -1)), (A,))],
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
    "Tanh": [Case(ops.tanh, (A,))],
    "Transpose": [
        Case(ops.transpose, (A,)),
        Case(lambda x: ops.transpose(x, (1, 2, 0)), (numbers(2, 3, 4),)),
    ],
}
