"""Apply ops: optimizers' update rules, in place on the variable and its slots, beside it.

Each runs over blocks small enough that variable, slots, gradient and scratch stay in the second-level cache from the
first operation on a block to the last, so that memory is passed over once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np

from runtime.errors import ShapeError
from runtime.graph.graph import Node, Output
from runtime.graph.initialisers import constant, zeros
from runtime.graph.math_ops import check_count, check_floating
from runtime.graph.ops import Attrs, Call, Cost, KernelContext, Op, register
from runtime.graph.state_ops import NAMED, update, update_lock, variable, variable_node
from runtime.kernels.matmul import compile_descent, descent_workspace
from runtime.kernels.parallel import free_shares
from runtime.tensor import TensorSpec

BLOCK_BYTES = 1 << 18
PARALLEL_BYTES = 1 << 21


class _Apply(Op):
    """Inputs: the variable, ``slots`` slots of its spec, the gradient, the learning rate (a scalar); no output."""

    attributes: ClassVar[tuple[str, ...]] = NAMED
    stateful = True
    mutates: ClassVar[tuple[int, ...]] = (0,)
    slots = 0
    flops = 2  # an element
    passes = 3  # over memory

    @classmethod
    def infer(cls, inputs: Sequence[TensorSpec], attrs: Attrs) -> list[TensorSpec]:  # type: ignore[override]
        check_count(inputs, cls.slots + 3)
        target = inputs[0]
        check_floating(target)
        for what, spec in zip([*["slot"] * cls.slots, "gradient"], inputs[1:-1]):
            if spec != target:
                raise ShapeError(f"the variable is {target}, the {what} {spec}")
        check_rate(inputs[-1], target)
        return []

    @classmethod
    def workspace(cls, inputs: Sequence[TensorSpec], attrs: Attrs, threads: int) -> int:  # type: ignore[override]
        return _threads(inputs[0].nbytes, threads) * min(BLOCK_BYTES, inputs[0].nbytes)

    @classmethod
    def cost(cls, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], attrs: Attrs) -> Cost:  # type: ignore[override]
        return Cost(cls.flops * inputs[0].size, cls.passes * inputs[0].nbytes)


def check_rate(rate: TensorSpec, target: TensorSpec) -> None:
    """ShapeError unless ``rate`` is a scalar of the variable's dtype."""
    if rate != TensorSpec((), target.dtype):
        raise ShapeError(f"the learning rate is {rate}, not a scalar of dtype {target.dtype.name}")


def _threads(nbytes: int, threads: int) -> int:
    """How many threads share an update: one, where handing over would cost more than it saves."""
    return threads if nbytes >= PARALLEL_BYTES else 1


def _blockwise(
    arrays: Sequence[np.ndarray],
    attrs: Attrs,
    context: KernelContext,
    step: Callable[..., None],
    before: Call | None = None,
) -> Call:
    """A call that runs ``before()``, then ``step(*blocks, scratch)`` over blocks of ``arrays``, of which the first is the variable.

    All of it holds the variable's lock.
    """
    target = arrays[0]
    size = max(1, min(BLOCK_BYTES // target.itemsize, target.size))
    threads = _threads(target.nbytes, context.threads)
    spare = context.workspace((threads, min(size, target.size)), target.dtype)
    flats = [array.reshape(-1) for array in arrays]
    items: list[list[Call]] = []
    for at in range(0, target.size, size):
        block = [flat[at : at + size] for flat in flats]
        items.append([partial(step, *block, scratch[: block[0].size]) for scratch in spare])
    update_blocks = free_shares(items)
    lock = update_lock(target, attrs, context)

    def run() -> None:
        with lock:
            if before is not None:
                before()
            update_blocks()

    return run


@register
class ApplySGD(_Apply):
    """var -= lr g"""

    @staticmethod
    def compile(
        inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], attrs: Attrs, context: KernelContext
    ) -> Call | None:
        target, gradient, rate = inputs

        def step(var: np.ndarray, g: np.ndarray, scratch: np.ndarray) -> None:
            np.multiply(g, rate, scratch)
            np.subtract(var, scratch, var)

        return _blockwise([target, gradient], attrs, context, step)


@register
class ApplySGDProduct(Op):
    """var -= lr a^T b: ApplySGD of the gradient of a dense layer's weights, which is used up as it is made and never stored.

    Inputs: the variable [m, n], a [batch, m], b [batch, n], the learning rate. Made by ``fusion``.
    """

    attributes = NAMED
    stateful = True
    mutates = (0,)

    @staticmethod
    def infer(inputs: Sequence[TensorSpec], attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 4)
        target, a, b, rate = inputs
        check_floating(target)
        if len(a.shape) != 2 or len(b.shape) != 2 or a.shape[0] != b.shape[0]:
            raise ShapeError(f"{a} and {b} are not matrices of as many rows")
        if target.shape != (a.shape[1], b.shape[1]) or not target.dtype == a.dtype == b.dtype:
            raise ShapeError(f"the variable is {target}, the product that of {a}^T and {b}")
        check_rate(rate, target)
        return []

    @staticmethod
    def workspace(inputs: Sequence[TensorSpec], attrs: Attrs, threads: int) -> int:
        rows, columns = inputs[0].shape
        return descent_workspace(rows, columns, inputs[0].dtype.itemsize, threads)

    @staticmethod
    def compile(
        inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], attrs: Attrs, context: KernelContext
    ) -> Call | None:
        target, a, b, rate = inputs
        size = descent_workspace(len(target), target.shape[1], target.itemsize, context.threads)
        memory = context.workspace((size,), np.uint8)
        descend = compile_descent(a.T, b, target, rate, context.threads, memory)
        lock = update_lock(target, attrs, context)

        def run() -> None:
            with lock:
                descend()

        return run

    @staticmethod
    def cost(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], attrs: Attrs) -> Cost:
        target, a, b, _ = inputs
        return Cost(2 * (a.shape[0] + 1) * target.size, 2 * target.nbytes + a.nbytes + b.nbytes)


@register
class ApplyMomentum(_Apply):
    """m = ``momentum`` m + g; var -= lr m, or with ``nesterov`` var -= lr (g + ``momentum`` m)"""

    attributes = (*NAMED, "momentum", "nesterov")
    slots = 1
    mutates = (0, 1)
    flops = 4
    passes = 5

    @staticmethod
    def compile(
        inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], attrs: Attrs, context: KernelContext
    ) -> Call | None:
        target, slot, gradient, rate = inputs
        momentum, nesterov = target.dtype.type(attrs["momentum"]), bool(attrs.get("nesterov"))

        def step(var: np.ndarray, m: np.ndarray, g: np.ndarray, scratch: np.ndarray) -> None:
            np.multiply(m, momentum, m)
            np.add(m, g, m)
            if nesterov:
                np.multiply(m, momentum, scratch)
                np.add(scratch, g, scratch)
                np.multiply(scratch, rate, scratch)
            else:
                np.multiply(m, rate, scratch)
            np.subtract(var, scratch, var)

        return _blockwise([target, slot, gradient], attrs, context, step)


@register
class ApplyAdagrad(_Apply):
    """s += g^2; var -= lr g / sqrt(s) (TensorFlow's form: no epsilon, the slot begins above zero)"""

    slots = 1
    mutates = (0, 1)
    flops = 6
    passes = 5

    @staticmethod
    def compile(
        inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], attrs: Attrs, context: KernelContext
    ) -> Call | None:
        target, slot, gradient, rate = inputs

        def step(var: np.ndarray, s: np.ndarray, g: np.ndarray, scratch: np.ndarray) -> None:
            np.multiply(g, g, scratch)
            np.add(s, scratch, s)
            np.sqrt(s, scratch)
            np.divide(g, scratch, scratch)
            np.multiply(scratch, rate, scratch)
            np.subtract(var, scratch, var)

        return _blockwise([target, slot, gradient], attrs, context, step)


@register
class ApplyAdam(_Apply):
    """Adam (Kingma and Ba, 2015, section 2, the efficient form): inputs variable, m, v, t, gradient, lr.

    t (int64 scalar) counts this variable's updates, so that bias correction is right for any number of workers.
    """

    attributes = (*NAMED, "beta1", "beta2", "epsilon")
    slots = 2
    mutates = (0, 1, 2, 3)
    flops = 12
    passes = 7

    @classmethod
    def infer(cls, inputs: Sequence[TensorSpec], attrs: Attrs) -> list[TensorSpec]:  # type: ignore[override]
        check_count(inputs, 6)
        if inputs[3] != TensorSpec((), np.dtype(np.int64)):
            raise ShapeError(f"the count of updates is an int64 scalar, not {inputs[3]}")
        return super().infer([*inputs[:3], *inputs[4:]], attrs)

    @staticmethod
    def compile(
        inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], attrs: Attrs, context: KernelContext
    ) -> Call | None:
        target, first, second, count, gradient, rate = inputs
        kind = target.dtype.type
        beta1, beta2 = float(attrs["beta1"]), float(attrs["beta2"])
        keep1, keep2, take1, take2 = kind(beta1), kind(beta2), kind(1 - beta1), kind(1 - beta2)
        epsilon = kind(attrs["epsilon"])
        alpha = np.zeros((), target.dtype)

        def step(var: np.ndarray, m: np.ndarray, v: np.ndarray, g: np.ndarray, scratch: np.ndarray) -> None:
            np.multiply(m, keep1, m)
            np.multiply(g, take1, scratch)
            np.add(m, scratch, m)
            np.multiply(v, keep2, v)
            np.multiply(g, g, scratch)
            np.multiply(scratch, take2, scratch)
            np.add(v, scratch, v)
            np.sqrt(v, scratch)
            np.add(scratch, epsilon, scratch)
            np.divide(m, scratch, scratch)
            np.multiply(scratch, alpha, scratch)
            np.subtract(var, scratch, var)

        def count_on() -> None:
            np.add(count, 1, count)
            t = int(count)
            alpha[()] = float(rate) * math.sqrt(1 - beta2**t) / (1 - beta1**t)

        return _blockwise([target, first, second, gradient], attrs, context, step, count_on)


def slot(target: Output, name: str, start: float = 0.0) -> Output:
    """The variable ``<target>/<name>`` beside ``target`` and of its spec; the graph's if it has it already."""
    return _slot(target, name, target.spec, start)


def _slot(target: Output, name: str, spec: TensorSpec, start: float) -> Output:
    owner = variable_node(target)
    full = f"{owner.name}/{name}"
    graph = target.graph
    if full in graph:
        return graph.node(full).out
    with graph.root_scope():
        return variable(
            full,
            spec.shape,
            spec.dtype,
            constant(start) if start else zeros(),
            container=owner.attrs.get("container", ""),
            colocate=owner.out,
        )


def _rate(target: Output, rate: Any) -> Output:
    """A number as a constant beside the variable; an output as it is."""
    with target.graph.colocate_with(variable_node(target)):
        return target.graph.as_output(rate, target.dtype)


def apply_sgd(target: Output, gradient: Output, rate: Any, name: str | None = None) -> Node:
    """var -= rate gradient. ``rate`` is a number or a scalar output."""
    return update("ApplySGD", target, gradient, _rate(target, rate), name=name)


def apply_momentum(
    target: Output,
    gradient: Output,
    rate: Any,
    momentum: float = 0.9,
    nesterov: bool = False,
    name: str | None = None,
) -> Node:
    """Stochastic gradient descent with momentum; the slot is ``<variable>/momentum``."""
    m = slot(target, "momentum")
    rate = _rate(target, rate)
    return update("ApplyMomentum", target, m, gradient, rate, name=name, momentum=momentum, nesterov=nesterov)


def apply_adagrad(target: Output, gradient: Output, rate: Any, initial: float = 0.1, name: str | None = None) -> Node:
    """Adagrad (Duchi et al., 2011); the slot ``<variable>/adagrad`` begins at ``initial``."""
    return update("ApplyAdagrad", target, slot(target, "adagrad", initial), gradient, _rate(target, rate), name=name)


def apply_adam(
    target: Output,
    gradient: Output,
    rate: Any,
    beta1: float = 0.9,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
    name: str | None = None,
) -> Node:
    """Adam; slots ``<variable>/adam_m``, ``adam_v`` and ``adam_t``."""
    m, v = slot(target, "adam_m"), slot(target, "adam_v")
    t = _slot(target, "adam_t", TensorSpec((), np.dtype(np.int64)), 0.0)
    rate = _rate(target, rate)
    return update("ApplyAdam", target, m, v, t, gradient, rate, name=name, beta1=beta1, beta2=beta2, epsilon=epsilon)
