"""Gradients, graph to graph: the derivative of a node is more nodes.

Differentiation knows nothing of devices: each gradient node is placed where the node is that it belongs to, and so the
partition makes a gradient's Send and Recv without a rule for them.
"""

from __future__ import annotations

from collections.abc import Sequence

from runtime.errors import GraphError
from runtime.graph.graph import Graph, Node, Output
from runtime.graph.ops import Op

SCOPE = "gradients"


def gradients(loss: Output, params: Sequence[Output], grad_loss: Output | None = None) -> list[Output | None]:
    """The derivative of ``loss`` (of its sum, if it is no scalar) by each of ``params``; None where it does not depend on one.

    ``grad_loss`` is the derivative of something further on by ``loss``, of its spec; ones by default. Adds nodes to the
    graph, in the scope "gradients". GraphError names the node on the way that has no gradient, or whose dtype has none.
    """
    graph = loss.graph
    for value in (loss, *params):
        if value.graph is not graph:
            raise GraphError(f"{value.name} belongs to another graph than {loss.name}")
        if not _differentiable(value):
            raise GraphError(f"{value.name} {value.spec} has no derivative: its dtype is not a floating one")
    if grad_loss is not None and grad_loss.spec != loss.spec:
        raise GraphError(f"grad_loss {grad_loss.name} {grad_loss.spec} is not of loss {loss.name} {loss.spec}")
    flows = _flowing(loss, params)
    with graph.root_scope(), graph.scope(SCOPE):
        return _Walk(graph, flows).run(loss, params, grad_loss)


def _differentiable(value: Output) -> bool:
    return value.dtype.kind in "fc"


def _flowing(loss: Output, params: Sequence[Output]) -> set[Output]:
    """Outputs on a differentiable way from a parameter to the loss."""
    flows: set[Output] = set(params)
    for node in loss.graph.nodes[: loss.node.index + 1]:
        if any(value in flows for value in node.inputs):
            flows.update(out for out in node.outputs if _differentiable(out))
    return flows


class _Walk:
    """Backwards over the nodes in reverse order of their making, which is a reverse topological one."""

    def __init__(self, graph: Graph, flows: set[Output]) -> None:
        self._graph = graph
        self._flows = flows
        self._parts: dict[Output, list[Output]] = {}

    def run(self, loss: Output, params: Sequence[Output], grad_loss: Output | None) -> list[Output | None]:
        if loss in self._flows:
            if grad_loss is None:
                with self._graph.colocate_with(loss.node):
                    grad_loss = self._graph.add("Fill", shape=loss.shape, value=1, dtype=loss.dtype).out
            self._parts[loss] = [grad_loss]
            for node in reversed(self._graph.nodes[: loss.node.index + 1]):
                self._back(node)
        return [self._sum(param) for param in params]

    def _back(self, node: Node) -> None:
        if not any(value in self._flows for value in node.inputs):
            return
        grads = [self._sum(out) for out in node.outputs]
        if all(grad is None for grad in grads):
            return
        if node.op.gradient is Op.gradient:
            raise GraphError(
                f"node {node.name} ({node.op.name}) has no gradient, but the loss depends on it; "
                f"stop_gradient() in front of it would cut the way"
            )
        with self._graph.colocate_with(node):
            by_input = node.op.gradient(self._graph, node, grads)
        if len(by_input) != len(node.inputs):
            raise GraphError(
                f"node {node.name} ({node.op.name}): {len(by_input)} gradients for {len(node.inputs)} inputs"
            )
        for value, grad in zip(node.inputs, by_input):
            if grad is None or value not in self._flows:
                continue
            if grad.spec != value.spec:
                raise GraphError(
                    f"node {node.name} ({node.op.name}): the gradient of input {value.name} {value.spec} is {grad.spec}"
                )
            self._parts.setdefault(value, []).append(grad)

    def _sum(self, value: Output) -> Output | None:
        """The whole gradient of an output. It is complete when asked for, since all its readers come later in the graph."""
        parts = self._parts.get(value)
        if not parts:
            return None
        if len(parts) > 1:
            # Where its first part is made, not where the value is: a variable's gradients are added up on the worker,
            # and one of them travels to the parameter server.
            with self._graph.colocate_with(parts[0].node):
                parts[:] = [self._graph.add("AddN", *parts).out]
        return parts[0]
