"""Fusion of a dense layer's weight gradient with the update that uses it up.

For a batch of 32 the gradient of a weight matrix takes as long to write and read again as to compute. Where nothing else wants
it and it need not travel, the update is applied block by block while the gradient is in cache, and no memory is kept for it.
The results are the same bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

from runtime.graph.graph import Graph, Node, Output
from runtime.graph.optimize import GraphCopy, Rewrite, memory_of
from runtime.graph.state_ops import Variable
from runtime.kernels.matmul import is_all_result


def fuse_updates(graph: Graph, fetches: Sequence[Output] = (), targets: Sequence[Node] = ()) -> Rewrite:
    """A copy of ``graph`` in which pairs of a product and ApplySGD are one node each, for a graph that runs on one device.

    The node that takes the update's place has its name. Products that are fetched or awaited stay.
    """
    readers: dict[Node, int] = {}
    for node in graph.nodes:
        for before in {*(value.node for value in node.inputs), *node.control}:
            readers[before] = readers.get(before, 0) + 1
    wanted = {*(value.node for value in fetches), *targets}
    fused = {
        node.inputs[1].node: node
        for node in graph.nodes
        if node.op.name == "ApplySGD"
        and readers[node.inputs[1].node] == 1
        and node.inputs[1].node not in wanted
        and _is_large_outer_product(node.inputs[1].node)
    }
    updates = set(fused.values())
    copy = GraphCopy()
    for node in graph.nodes:
        if node in fused:
            continue
        if node in updates:
            _add_fused(copy, node)
        else:
            copy.add(node)
    return copy.rewrite


def _is_large_outer_product(node: Node) -> bool:
    if node.op.name != "MatMul" or not node.attrs.get("transpose_a") or node.attrs.get("transpose_b") or node.control:
        return False
    a, b = node.inputs
    if any(memory_of(value).node.op is Variable for value in (a, b)):
        return False  # it may be changed before the update runs, and is read at the product's place
    return a != b and is_all_result(a.shape[1], a.shape[0], b.shape[1], a.dtype.itemsize)


def _add_fused(copy: GraphCopy, update: Node) -> None:
    target, gradient, rate = update.inputs
    a, b = gradient.node.inputs
    made = copy.rewrite.graph.add(
        "ApplySGDProduct",
        *(copy.rewrite.outputs[value] for value in (target, a, b, rate)),
        name=update.name,
        device=update.device,
        control=copy.control(update),
        **update.attrs,
    )
    copy.becomes(update, made)
