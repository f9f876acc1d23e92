"""Graphs as protobuf messages (runtime/cluster/proto/graph.proto).

A message is taken as hostile: whatever it holds, reading it gives a graph or a GraphError, and allocates no more than
the message's own size times a small factor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from runtime.cluster.proto import graph_pb2
from runtime.errors import GraphError
from runtime.graph.graph import Graph, Node, Output
from runtime.tensor import DTYPE_CODES, DTYPES_BY_CODE, TensorSpec


def graph_to_proto(graph: Graph) -> graph_pb2.Graph:
    """All nodes, in their order. Output specs do not travel: the reader infers them anew."""
    message = graph_pb2.Graph()
    for node in graph.nodes:
        entry = message.nodes.add(
            name=node.name,
            op=node.op.name,
            inputs=[value.name for value in node.inputs],
            control=[before.name for before in node.control],
            device=node.device,
            colocate=node.colocate,
        )
        for key, value in node.attrs.items():
            _write_attribute(entry.attributes[key], value)
    return message


def graph_from_proto(message: graph_pb2.Graph) -> Graph:
    """The graph that a message describes; GraphError names the node that cannot be."""
    graph = Graph()
    later = {entry.name: position for position, entry in enumerate(message.nodes)}
    for position, entry in enumerate(message.nodes):
        inputs = [_output(graph, entry.name, name, later, position) for name in entry.inputs]
        control = [_node(graph, entry.name, name, later, position) for name in entry.control]
        if entry.colocate and entry.colocate not in later:
            raise GraphError(f"node {entry.name} is to be where {entry.colocate!r} is, which is not in the graph")
        graph.add(
            entry.op,
            *inputs,
            name=entry.name,
            device=entry.device,
            control=control,
            colocate=entry.colocate,
            **_read_attributes(entry),
        )
    return graph


def dump_graph(graph: Graph) -> bytes:
    """The same bytes for the same graph, in every process."""
    return graph_to_proto(graph).SerializeToString(deterministic=True)


def load_graph(content: bytes) -> Graph:
    """The graph that ``dump_graph`` wrote; GraphError for anything else."""
    message = graph_pb2.Graph()
    try:
        message.ParseFromString(content)
    except DecodeError as error:
        raise GraphError(f"{len(content)} bytes are not a serialised graph: {error}") from error
    return graph_from_proto(message)


def _node(graph: Graph, reader: str, name: str, positions: Mapping[str, int], position: int) -> Node:
    if name in graph:
        return graph.node(name)
    if positions.get(name, -1) >= position:
        raise GraphError(
            f"node {reader} needs {name}, which does not come before it: the graph has a cycle or no order"
        )
    raise GraphError(f"node {reader} needs {name!r}, which is not in the graph")


def _output(graph: Graph, reader: str, name: str, positions: Mapping[str, int], position: int) -> Output:
    stem, _, index = name.rpartition(":")
    node = _node(graph, reader, stem, positions, position)
    if not index.isascii() or not index.isdigit() or len(index) > 9 or int(index) >= len(node.specs):
        raise GraphError(f"node {reader} needs output {name!r}, but {stem} has {len(node.specs)} outputs")
    return Output(node, int(index))


def _write_attribute(message: graph_pb2.Attribute, value: Any) -> None:
    match value:
        case None:
            pass
        case bool():
            message.boolean = value
        case int():
            message.integer = value
        case float():
            message.floating = value
        case str():
            message.text = value
        case np.dtype():
            message.dtype = DTYPE_CODES[value.name]
        case np.ndarray():
            message.tensor.dtype = DTYPE_CODES[value.dtype.name]
            message.tensor.shape.sizes.extend(value.shape)
            message.tensor.content = value.astype(value.dtype.newbyteorder("<"), copy=False).tobytes()
        case tuple() if all(isinstance(item, int) for item in value):
            message.integers.values.extend(value)
            message.integers.SetInParent()
        case _:
            message.floats.values.extend(value)


def _read_attributes(entry: graph_pb2.Node) -> dict[str, Any]:
    attrs = {}
    for key, message in entry.attributes.items():
        if key in ("op", "name", "device", "control", "colocate", "self"):
            raise GraphError(f"node {entry.name} has an attribute of the reserved name {key!r}")
        attrs[key] = _read_attribute(entry.name, message)
    return attrs


def _read_attribute(node: str, message: graph_pb2.Attribute) -> Any:
    match message.WhichOneof("value"):
        case None:
            return None
        case "integers":
            return tuple(message.integers.values)
        case "floats":
            return tuple(message.floats.values)
        case "dtype":
            return _dtype(node, message.dtype)
        case "tensor":
            tensor = message.tensor
            spec = TensorSpec(tuple(tensor.shape.sizes), _dtype(node, tensor.dtype))
            if spec.nbytes != len(tensor.content):
                raise GraphError(f"node {node}: {len(tensor.content)} bytes are not a tensor {spec} of {spec.nbytes}")
            try:
                array = np.frombuffer(tensor.content, spec.dtype.newbyteorder("<")).reshape(spec.shape)
            except ValueError as error:  # numpy refuses sizes that are too large even where another one is zero
                raise GraphError(f"node {node}: {spec} is no array: {error}") from error
            return array.astype(spec.dtype)  # a copy: protobuf's bytes have no alignment
        case kind:
            return getattr(message, kind)


def _dtype(node: str, code: int) -> np.dtype:
    dtype = DTYPES_BY_CODE.get(code)
    if dtype is None:
        raise GraphError(f"node {node}: there is no dtype of code {code}")
    return dtype
