"""State ops: variables, and what reads and changes them (``replica_ops``: what replicas wait for each other with).

A variable's output *is* its memory on the task that owns it. Every op that reads it, there or through a Send, sees it as of
its own place in the graph: in one step, reads and writes of a variable keep the order in which the nodes were added.
Between steps of different workers there is no order: an asynchronous pull may see an update half done (Hogwild).
``read_variable`` copies under the update lock and so never tears within one variable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np

from runtime.errors import GraphError, ShapeError
from runtime.graph.graph import Graph, Node, Output, current_graph
from runtime.graph.initialisers import INIT_ATTRIBUTES, KINDS, Initialiser, write_initial, zeros
from runtime.graph.math_ops import check_count
from runtime.graph.ops import Attrs, Call, Cost, KernelContext, Op, Passive, register
from runtime.tensor import TensorSpec, dtype_of

GLOBAL_STEP = "global_step"
NAMED = ("variable", "container")  # attributes of an op that belongs to a variable, as the variable's own


@register
class Variable(Passive):
    """Memory of ``shape`` and ``dtype`` that outlives the step, known as ``variable`` in ``container``.

    The first graph to be registered with it creates and initialises it (attributes of ``initialisers``).
    """

    attributes = (*NAMED, "shape", "dtype", *INIT_ATTRIBUTES)
    resident = True
    stateful = True

    @staticmethod
    def infer(inputs: Sequence[TensorSpec], attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 0)
        if not attrs["variable"] or attrs["init"] not in KINDS:
            raise GraphError(f"needs a variable's name and an initialiser of {', '.join(KINDS)}")
        spec = TensorSpec(tuple(attrs["shape"]), dtype_of(attrs["dtype"]))
        if attrs["init"] == "tensor" and TensorSpec.of(attrs["init_value"]) != spec:
            raise ShapeError(f"initial value {TensorSpec.of(attrs['init_value'])} is not {spec}")
        return [spec]

    @staticmethod
    def memory(attrs: Attrs, resources: Any) -> Sequence[np.ndarray]:
        spec = TensorSpec(tuple(attrs["shape"]), dtype_of(attrs["dtype"]))
        return [resources.variable(attrs["variable"], spec, partial(write_initial, attrs), attrs.get("container", ""))]


def update_lock(memory: np.ndarray, attrs: Attrs, context: KernelContext) -> Any:
    """The lock to hold while changing the variable that an op's attributes name."""
    return context.resources.update_lock(attrs["variable"], TensorSpec.of(memory), attrs.get("container", ""))


@register
class ReadVariable(Op):
    """A copy of a variable that no update was half done in."""

    attributes = NAMED
    stateful = True

    @staticmethod
    def infer(inputs: Sequence[TensorSpec], attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 1)
        return [inputs[0]]

    @staticmethod
    def compile(
        inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], attrs: Attrs, context: KernelContext
    ) -> Call | None:
        (memory,), (out,) = inputs, outputs
        lock = update_lock(memory, attrs, context)

        def read() -> None:
            with lock:
                np.copyto(out, memory)

        return read

    @staticmethod
    def gradient(graph: Graph, node: Node, grads: Sequence[Output | None]) -> Sequence[Output | None]:
        return [grads[0]]

    @staticmethod
    def cost(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], attrs: Attrs) -> Cost:
        return Cost(0, 2 * outputs[0].nbytes)


class _Assignment(Op):
    """Inputs (variable, value); the output is the variable's memory afterwards, which ``change`` makes of the two."""

    attributes: ClassVar[tuple[str, ...]] = NAMED
    alias = True
    mutates = (0,)
    stateful = True
    change: ClassVar[Callable[..., Any]]  # (memory, value)

    @staticmethod
    def infer(inputs: Sequence[TensorSpec], attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 2)
        if inputs[0] != inputs[1]:
            raise ShapeError(f"the variable is {inputs[0]}, the value {inputs[1]}")
        return [inputs[0]]

    @classmethod
    def compile(  # type: ignore[override]
        cls, inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], attrs: Attrs, context: KernelContext
    ) -> Call | None:
        memory, value = inputs
        lock, change = update_lock(memory, attrs, context), cls.change

        def assign_locked() -> None:
            with lock:
                change(memory, value)

        return assign_locked


@register
class Assign(_Assignment):
    change = staticmethod(np.copyto)


@register
class AssignAdd(_Assignment):
    @staticmethod
    def change(memory: np.ndarray, value: np.ndarray) -> None:
        np.add(memory, value, memory)


def variable(
    name: str,
    shape: Sequence[int],
    dtype: Any = np.float32,
    initialiser: Initialiser | None = None,
    *,
    container: str = "",
    colocate: Output | None = None,
) -> Output:
    """A variable of the current graph, zeros unless ``initialiser`` says otherwise. Graphs that use its name share it.

    It goes where ``Graph.variable_devices`` says, or the device block around; or beside ``colocate``.
    """
    graph = current_graph() if colocate is None else colocate.graph
    spec = TensorSpec(tuple(shape), dtype_of(dtype))
    full = graph.scoped_name(name)
    attrs = (initialiser or zeros()).attrs(full, spec)
    if colocate is None:
        device, beside = graph.variable_device(spec), ""
    else:
        device, beside = colocate.node.device, colocate.node.colocate or colocate.node.name
    return graph.add(
        "Variable",
        name=name,
        device=device,
        colocate=beside,
        shape=spec.shape,
        dtype=spec.dtype,
        variable=full,
        container=container,
        **attrs,
    ).out


def variables(graph: Graph) -> list[Output]:
    """The variables of a graph, in the order in which they were added."""
    return [node.out for node in graph.nodes if node.op is Variable]


def variable_node(value: Output) -> Node:
    """The variable whose memory an output is; GraphError if it is none's."""
    node, at = value.node, value.index
    while node.op.alias and at == 0 and node.inputs:
        node, at = node.inputs[0].node, node.inputs[0].index
    if node.op is not Variable:
        raise GraphError(f"{value.name} is not a variable, so it cannot be changed")
    return node


def update(op: str, target: Output, *inputs: Output, name: str | None = None, **attrs: Any) -> Node:
    """Add an op that changes the variable ``target`` (and slots among ``inputs``) beside it."""
    owner = variable_node(target)
    with target.graph.colocate_with(owner):
        return target.graph.add(
            op,
            target,
            *inputs,
            name=name,
            variable=owner.attrs["variable"],
            container=owner.attrs.get("container", ""),
            **attrs,
        )


def assign(target: Output, value: Any, name: str | None = None) -> Output:
    """Overwrite a variable; gives it as it is afterwards."""
    with target.graph.colocate_with(variable_node(target)):
        value = target.graph.as_output(value, target.dtype)
    return update("Assign", target, value, name=name).out


def assign_add(target: Output, value: Any, name: str | None = None) -> Output:
    """Add to a variable; gives it as it is afterwards."""
    with target.graph.colocate_with(variable_node(target)):
        value = target.graph.as_output(value, target.dtype)
    return update("AssignAdd", target, value, name=name).out


def read_variable(target: Output, name: str | None = None) -> Output:
    """A copy, taken beside the variable while no update of it is half done."""
    return update("ReadVariable", target, name=name).out


def global_step(graph: Graph | None = None) -> Output:
    """The step counter of training, an int64 scalar: the graph's if it has one, else a new one."""
    if graph is None:  # an empty one counts as false
        graph = current_graph()
    if GLOBAL_STEP in graph:
        return graph.node(GLOBAL_STEP).out
    with graph.as_default(), graph.root_scope():
        return variable(GLOBAL_STEP, (), np.int64)
