"""Graph: building, names, errors that name the node and both shapes; serialised graphs."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.cluster.proto import graph_pb2
from runtime.errors import GraphError, ShapeError, VerbflowError
from runtime.graph import array_ops as ops
from runtime.graph import replica_ops as replicas
from runtime.graph import state_ops as state
from runtime.graph.gradients import gradients
from runtime.graph.graph import Graph, Output, current_graph
from runtime.graph.ops import known_ops, normal_attrs, op_class, register
from runtime.graph.serialize import dump_graph, graph_from_proto, graph_to_proto, load_graph
from runtime.tests.interpreter import evaluate
from runtime.tests.random_graphs import Drawn, graphs


@pytest.fixture
def graph():
    made = Graph()
    with made.as_default():
        yield made


def test_names_are_made_scoped_and_unique(graph: Graph) -> None:
    x = ops.placeholder((2,), name="x")
    with graph.scope("layer"), graph.scope("inner"):
        first, second = ops.exp(x), ops.exp(x)
        with graph.root_scope():
            top = ops.exp(x, name="top")
    assert [value.name for value in (first, second, top)] == ["layer/inner/Exp:0", "layer/inner/Exp_1:0", "top:0"]
    ops.exp(x, name="Exp_1")
    assert [ops.exp(x).node.name for _ in range(3)] == ["Exp", "Exp_2", "Exp_3"]
    with pytest.raises(GraphError, match=r"node name 'top' is taken by <Exp top"):
        ops.neg(x, name="top")
    for bad in ("", "a b", "/a", "a:0", "ö"):
        with pytest.raises(GraphError, match="must match"):
            ops.neg(x, name=bad)


def test_nodes_and_outputs_are_found_by_name(graph: Graph) -> None:
    x = ops.placeholder((4,), name="input")
    low, high = ops.split(x, 2)
    assert graph.output("input") == x and graph.output("Split:1") == high and high != low
    assert graph.node("Split").outputs == (low, high)
    with pytest.raises(GraphError, match="no node is called 'imput'; near: input"):
        graph.node("imput")
    with pytest.raises(GraphError, match="Split has 2 outputs, no output '2'"):
        graph.output("Split:2")
    with pytest.raises(GraphError, match=r"Split \(Split\) has 2 outputs, not one"):
        graph.output("Split")


def test_unknown_ops_and_devices(graph: Graph) -> None:
    with pytest.raises(GraphError, match=r"unknown op 'Matmul'; did you mean MatMul"):
        graph.add("Matmul")
    for bad in ("gpu:0", "/job:ps", "/job:ps/task:x", "/job:/task:0", "/job:ps/task:0/"):
        with pytest.raises(GraphError, match="is not of the form /job:NAME/task:N"):
            graph.add("NoOp", device=bad)
    with pytest.raises(GraphError, match="registered twice"):
        register(type("Add", (op_class("Add"),), {"name": "Add"}))


def test_an_attribute_that_the_op_does_not_state_is_refused(graph: Graph) -> None:
    x = ops.placeholder((2, 2))
    with pytest.raises(
        GraphError, match=r"y \(MatMul\): no such attribute: 'transpose_B'; its.* transpose_a, transpose_b"
    ):
        graph.add("MatMul", x, x, name="y", transpose_B=True)
    with pytest.raises(GraphError, match=r"Neg \(Neg\): no such attribute: 'axis', 'keepdims'; it takes none"):
        graph.add("Neg", x, axis=0, keepdims=True)
    assert len(graph) == 1 and "y" not in graph

    message = graph_to_proto(graph)
    message.nodes[0].attributes["layout"].text = "NHWC"
    with pytest.raises(GraphError, match=r"Placeholder \(Placeholder\): no such attribute: 'layout'"):
        graph_from_proto(message)


@pytest.mark.parametrize("name", known_ops())
def test_every_op_refuses_attributes_that_it_does_not_state(name: str) -> None:
    with pytest.raises(GraphError) as refused:
        Graph().add(name, misspelt=1)
    for part in (name, "'misspelt'", *op_class(name).attributes):
        assert part in str(refused.value)


def test_inputs_must_be_of_the_same_graph(graph: Graph) -> None:
    x = ops.placeholder((2,), name="x")
    other = Graph()
    with pytest.raises(GraphError, match="node Neg: input x:0 belongs to another graph"):
        other.add("Neg", x)
    with pytest.raises(GraphError, match="control input x belongs to another graph"):
        other.add("NoOp", control=[x.node])
    with pytest.raises(GraphError, match=r"input 3 is not a graph output; wrap numbers with constant\(\)"):
        graph.add("Neg", 3)  # type: ignore[arg-type]
    with pytest.raises(GraphError, match="no graph is current"):
        _outside()


def _outside() -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            current_graph()  # of another thread
        except GraphError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    raise errors[0]


def test_blocks_nest_and_end(graph: Graph) -> None:
    with graph.device("/job:ps/task:0"):
        a = graph.add("NoOp", name="a")
        with graph.device("/job:worker/task:3"), graph.control_dependencies([a]):
            b = graph.add("NoOp")
        with graph.device(""):
            c = graph.add("NoOp")
    d = graph.add("NoOp", control=[a, a, b])
    with graph.colocate_with(b):
        e = graph.add("NoOp")
        with graph.colocate_with(e):
            f = graph.add("NoOp")
    assert [node.device for node in (a, b, c, d, e, f)] == [
        "/job:ps/task:0", "/job:worker/task:3", "", "", "/job:worker/task:3", "/job:worker/task:3",
    ]  # fmt: skip
    assert (b.control, c.control, d.control) == ((a,), (), (a, b))
    assert e.colocate == f.colocate == b.name


def test_an_output_stands_for_its_node_in_blocks_and_control_inputs(graph: Graph) -> None:
    x = ops.placeholder((2,), name="x")
    with graph.control_dependencies([x]), graph.colocate_with(x):
        y = graph.add("NoOp", control=[x])
    assert y.control == (x.node,) and y.colocate == "x"
    with pytest.raises(GraphError, match="'x' is neither a node nor an output"):
        graph.add("NoOp", control=["x"])  # type: ignore[list-item]


def test_operators_take_numbers_and_arrays(graph: Graph) -> None:
    x = ops.placeholder((2,), name="x")
    array = np.array([3.0, 4.0])
    values = [x + 1, 1 - x, 2 * x, 1 / x, -x, array + x, array / x, np.float64(2) * x, x - array]
    assert {value.dtype for value in values} == {np.dtype(np.float32)}
    m = ops.reshape(x, (1, 2))
    values += [m @ array.reshape(2, 1), array.reshape(2, 1) @ m]
    got = evaluate(graph, values, {"x": [1, 2]})
    y = np.array([1, 2], np.float32)
    wanted = [
        y + 1, 1 - y, 2 * y, 1 / y, -y, array + y, array / y, 2 * y, y - array, [[11]], [[3, 6], [4, 8]],
    ]  # fmt: skip
    for value, want in zip(got, wanted):
        np.testing.assert_allclose(value, want)


SHAPE_ERRORS: list[tuple[str, Any]] = [
    (r"a:0 float32\[2, 3\], b:0 float32\[4\].*shapes \(2, 3\) and \(4,\) do not broadcast", lambda v: v["a"] + v["b"]),
    (r"inner sizes of \(2, 3\) and \(2, 3\) differ", lambda v: v["a"] @ v["a"]),
    (
        r"inner sizes of \(2, 3\)\^T and \(4, 5\) differ",
        lambda v: ops.matmul(v["a"], v["m"], transpose_a=True),
    ),
    (r"takes two matrices, not shapes \(2, 3\) and \(4,\)", lambda v: v["a"] @ v["b"]),
    (r"dtypes float32 and int32 differ; use cast", lambda v: v["a"] + v["i"]),
    (r"needs a floating dtype, not int32", lambda v: ops.exp(v["i"])),
    (r"needs a floating dtype, not int32", lambda v: v["i"] / v["i"]),
    (r"float32\[2, 3\] and float32\[4\] differ", lambda v: ops.add_n([v["a"], v["b"]])),
    (r"shape \(2, 3\) \(6 elements\) cannot become \(4, 2\)", lambda v: ops.reshape(v["a"], (4, 2))),
    (r"shape \(2, 3\) cannot become \(4, -1\)", lambda v: ops.reshape(v["a"], (4, -1))),
    (r"\(0, 0\) is not a permutation of the axes of shape \(2, 3\)", lambda v: ops.transpose(v["a"], (0, 0))),
    (r"shapes \(2, 3\) and \(4, 5\) differ in more than axis 0", lambda v: ops.concat([v["a"], v["m"]], 0)),
    (r"axis 2 is not one of a tensor of rank 2", lambda v: ops.concat([v["a"]], 2)),
    (r"sizes \(1, 1\) do not sum to 3, axis 1", lambda v: ops.split(v["a"], (1, 1), 1)),
    (r"cannot be cut into 2 equal pieces", lambda v: ops.split(v["a"], 2, 1)),
    (r"slice from \(1, 0\) of size \(2, 3\) does not lie", lambda v: ops.slice_(v["a"], (1, 0), (2, 3))),
    (r"paddings \(1,\) are not", lambda v: v["a"].graph.add("Pad", v["a"], paddings=(1,))),
    (r"shapes \(4,\) and \(2, 3\) do not broadcast", lambda v: ops.broadcast_to(v["b"], (2, 3))),
    (r"shapes \(2, 3\) and \(2,\) do not broadcast", lambda v: ops.sum_to_shape(v["a"], (2,))),
    (r"axes \(0, -2\) name one axis twice", lambda v: ops.reduce_sum(v["a"], (0, -2))),
    (r"axis 5 is not one", lambda v: ops.argmax(v["a"], 5)),
    (r"indices must be integers, not float32", lambda v: ops.gather(v["a"], v["b"])),
    (r"the condition must be bool, not float32", lambda v: ops.select(v["a"], v["a"], v["a"])),
    (r"no maximum of no elements", lambda v: ops.reduce_max(ops.placeholder((0, 2)), 0)),
    (r"no mean of no elements", lambda v: ops.reduce_mean(ops.placeholder((0, 2)))),
    (r"takes 1 inputs, got 2", lambda v: v["a"].graph.add("Neg", v["a"], v["a"])),
    (r"is not a shape of rank 0 to 8", lambda v: ops.placeholder((-1, 2))),
    (r"dtype <class 'str'> is not supported", lambda v: ops.placeholder((1,), str)),
    (r"the variable is float32\[2\], the value float32\[3\]", lambda v: state.assign(v["w"], np.ones(3))),
    (r"gradient a:0 float32\[2, 3\] is not of variable w:0 float32\[2\]",
     lambda v: replicas.accumulator_apply(v["w"], v["a"], v["s"], 0)),
]  # fmt: skip


@pytest.mark.parametrize(("message", "build"), SHAPE_ERRORS)
def test_shape_errors_name_the_node_and_both_shapes(graph: Graph, message: str, build: Any) -> None:
    inputs = {
        "a": ops.placeholder((2, 3), name="a"),
        "b": ops.placeholder((4,), name="b"),
        "m": ops.placeholder((4, 5), name="m"),
        "i": ops.placeholder((2, 3), np.int32, name="i"),
        "s": ops.placeholder((), np.int64, name="s"),
        "w": state.variable("w", (2,)),
    }
    count = len(graph)
    with pytest.raises(ShapeError, match=message):
        build(inputs)
    added = [node.op.name for node in graph.nodes[count:]]
    assert set(added) <= {"Placeholder", "Constant"}, "the node that failed is not in the graph"


def test_missing_and_impossible_attributes(graph: Graph) -> None:
    x = ops.placeholder((2,), name="x")
    with pytest.raises(GraphError, match=r"node Cast \(Cast\) lacks the attribute 'dtype'"):
        graph.add("Cast", x)
    with pytest.raises(GraphError, match=r"attribute value=.* cannot be stored in a graph"):
        graph.add("Fill", shape=(1,), dtype=np.float32, value=object())
    with pytest.raises(
        GraphError, match=r"node Reshape \(Reshape\) has attributes that its op cannot use: invalid literal"
    ):
        graph.add("Reshape", x, shape="wide")
    with pytest.raises(GraphError, match=r"attribute seed=.* does not fit 64 bits"):
        graph.add("Dropout", x, rate=0.5, seed=1 << 70)
    with pytest.raises(ShapeError, match=r"placeholder y of shape \(None, 3\): shapes are static here"):
        ops.placeholder((None, 3), name="y")  # type: ignore[arg-type]
    array = np.arange(3)
    attrs = normal_attrs({"a": [1, np.int64(2)], "b": [1, 2.5], "c": np.float32(0.5), "d": np.float16, "e": array})
    assert (attrs["a"], attrs["b"], attrs["c"], attrs["d"]) == ((1, 2), (1.0, 2.5), 0.5, np.dtype(np.float16))
    array[0] = 9
    assert attrs["e"][0] == 0 and not attrs["e"].flags.writeable


# Serialised graphs


def _example() -> tuple[Graph, Output]:
    graph = Graph()
    with graph.as_default(), graph.device("/job:worker/task:0"):
        x = ops.placeholder((2, 3), np.float64, "x")
        with graph.scope("layer"):
            w = state.variable("w", (3, 4), np.float64, colocate=x)
        parts = ops.split(ops.matmul(x, w), (1, 3), 1)
        with graph.control_dependencies([w.node]):
            y = ops.reduce_sum(ops.square(parts[1])) * 0.5 + ops.constant(np.array([[1.5]]))
        gradients(y, [w])
    return graph, y


def test_a_graph_survives_its_journey_with_everything_in_it() -> None:
    graph, y = _example()
    content = dump_graph(graph)
    again = load_graph(content)
    assert dump_graph(again) == content
    for old, new in zip(graph.nodes, again.nodes, strict=True):
        assert (old.name, old.op, old.device, old.colocate, old.specs) == (
            new.name, new.op, new.device, new.colocate, new.specs,
        )  # fmt: skip
        assert [value.name for value in old.inputs] == [value.name for value in new.inputs]
        assert [node.name for node in old.control] == [node.name for node in new.control]
        assert old.attrs.keys() == new.attrs.keys()
        for key, value in old.attrs.items():
            np.testing.assert_array_equal(value, new.attrs[key])
            assert type(value) is type(new.attrs[key])
    feeds = {"x": np.ones((2, 3))}
    np.testing.assert_array_equal(evaluate(graph, [y], feeds), evaluate(again, [again.output(y.name)], feeds))


def test_every_kind_of_attribute_survives(monkeypatch: pytest.MonkeyPatch) -> None:
    values: dict[str, Any] = {
        "nothing": None, "yes": True, "no": False, "zero": 0, "big": -(2**62), "half": 0.5, "empty": "",
        "text": "añ", "ints": (1, -2), "none": (), "floats": (0.0, -0.0, float("inf")), "dtype": np.dtype(bool),
        "scalar": np.array(3, np.int8), "hollow": np.zeros((0, 3), np.float16), "array": np.arange(6.0).reshape(2, 3),
        "flags": np.array([True, False]), "complex": np.array([1j], np.complex64),
    }  # fmt: skip
    monkeypatch.setattr(op_class("NoOp"), "attributes", tuple(values))
    graph = Graph()
    graph.add("NoOp", **values)
    attrs = load_graph(dump_graph(graph)).nodes[0].attrs
    assert attrs.keys() == values.keys()
    for key, value in values.items():
        assert type(attrs[key]) is type(value)
        if isinstance(value, np.ndarray):
            assert (attrs[key].dtype, attrs[key].shape) == (value.dtype, value.shape)
            assert attrs[key].tobytes() == value.tobytes()
        else:
            assert repr(attrs[key]) == repr(value)


@settings(max_examples=40)
@given(graphs())
def test_random_graphs_survive_and_give_the_same_bits(drawn: Drawn) -> None:
    again = load_graph(dump_graph(drawn.graph))
    assert dump_graph(again) == dump_graph(drawn.graph)
    wanted = evaluate(drawn.graph, drawn.fetches, drawn.feeds)
    got = evaluate(again, [again.output(value.name) for value in drawn.fetches], drawn.feeds)
    assert [value.tobytes() for value in got] == [value.tobytes() for value in wanted]


def _message(**changes: Any) -> graph_pb2.Graph:
    graph = Graph()
    with graph.as_default():
        x = ops.placeholder((2,), name="x")
        ops.neg(ops.exp(x, name="e"), name="n")
    message = graph_to_proto(graph)
    for key, value in changes.items():
        getattr(message.nodes[1], key)[:] = value
    return message


def test_cycles_and_forward_references_are_refused() -> None:
    for inputs, match in (
        (["n:0"], "node e needs n, which does not come before it: the graph has a cycle or no order"),
        (["e:0"], "node e needs e, which does not come before it"),
        (["nobody:0"], "node e needs 'nobody', which is not in the graph"),
        (["x:1"], "needs output 'x:1', but x has 1 outputs"),
        (["x"], "node e needs"),
        (["x:٠"], "needs output"),
        (["x:" + "9" * 30], "needs output"),
    ):
        with pytest.raises(GraphError, match=match):
            graph_from_proto(_message(inputs=inputs))
    with pytest.raises(GraphError, match="node e needs n, which does not come before it"):
        graph_from_proto(_message(control=["n"]))


def test_malformed_graphs_are_refused_with_the_nodes_name() -> None:
    def broken(change: Any) -> graph_pb2.Graph:
        message = _message()
        change(message)
        return message

    def bad_tensor(message: graph_pb2.Graph) -> None:
        tensor = message.nodes[0].attributes["value"].tensor
        message.nodes[0].op = "Constant"
        tensor.dtype, tensor.content = 11, b"123"
        tensor.shape.sizes.append(1)

    def huge(message: graph_pb2.Graph) -> None:
        bad_tensor(message)
        message.nodes[0].attributes["value"].tensor.shape.sizes[:] = [1 << 62, 1 << 62]

    def hollow(message: graph_pb2.Graph) -> None:
        bad_tensor(message)
        message.nodes[0].attributes["value"].tensor.content = b""
        message.nodes[0].attributes["value"].tensor.shape.sizes[:] = [0, 1 << 62]

    cases = [
        (hollow, "node x: .* is no array"),
        (lambda m: setattr(m.nodes[0], "op", "Evil"), "unknown op 'Evil'"),
        (lambda m: setattr(m.nodes[1], "name", "x"), "node name 'x' is taken"),
        (lambda m: setattr(m.nodes[1], "device", "/dev/null"), "is not of the form"),
        (lambda m: setattr(m.nodes[1], "colocate", "ghost"), "is to be where 'ghost' is"),
        (lambda m: m.nodes[0].attributes.pop("shape"), "node x .* lacks the attribute 'shape'"),
        (lambda m: setattr(m.nodes[0].attributes["shape"], "text", "wide"), "node x"),
        (lambda m: setattr(m.nodes[0].attributes["dtype"], "dtype", 99), "node x: there is no dtype of code 99"),
        (lambda m: setattr(m.nodes[0].attributes["device"], "text", "y"), "reserved name 'device'"),
        (bad_tensor, r"node x: 3 bytes are not a tensor float32\[1\] of 4"),
        (huge, "node x: 3 bytes are not a tensor"),
    ]
    for change, match in cases:
        with pytest.raises(GraphError, match=match):
            graph_from_proto(broken(change))
    with pytest.raises(GraphError, match="are not a serialised graph"):
        load_graph(b"\xff\xff\xff")


@settings(max_examples=200)
@given(st.data())
def test_damaged_bytes_give_a_graph_or_an_error_of_ours(data: st.DataObject) -> None:
    content = bytearray(dump_graph(_example()[0]))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    try:
        load_graph(bytes(content))
    except VerbflowError:
        pass


def test_importing_one_module_registers_every_op() -> None:
    code = "import runtime.graph.serialize; from runtime.graph.ops import known_ops; print(*known_ops())"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert set(told.stdout.split()) >= {"MatMul", "Conv2D", "Variable", "ApplyAdam", "Send", "Recv"}
    assert set(told.stdout.split()) == {
        name for name in known_ops() if op_class(name).__module__.startswith("runtime.graph")
    }
