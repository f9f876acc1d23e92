"""The op registry: one class an op gives its shape rule, kernel, gradient and cost.

A graph is fully static in shape: a placeholder states its shape, and a new batch size is a new placeholder. So a kernel is
*compiled* once against the very arrays that it will read and write, and a step is a list of calls without arguments.
"""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from runtime.errors import GraphError
from runtime.tensor import TensorSpec, dtype_of

if TYPE_CHECKING:
    from runtime.graph.graph import Graph, Node, Output

Attrs = Mapping[str, Any]
Call = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Cost:
    """What one execution takes: floating-point operations, and bytes read plus written."""

    flops: int
    nbytes: int


class KernelContext:
    """What a kernel gets beside its arrays when it is compiled.

    ``resources``: what lives longer than a step on this task (variables, accumulators, queues), shared by all sessions.
    ``threads``: how many threads a kernel may use for itself (1: none but the caller's).
    ``node``: the node's name, for messages. ``step``: the running step, read at call time (its ``id`` and ``deadline``).
    """

    def __init__(self, memory: np.ndarray, resources: Any, threads: int, node: str, step: Any) -> None:
        self._memory = memory
        self.resources = resources
        self.threads = threads
        self.node = node
        self.step = step

    def workspace(self, shape: Sequence[int], dtype: Any, offset: int = 0) -> np.ndarray:
        """A view of temporary memory, 64-byte aligned where ``offset`` (bytes) is; at most what ``Op.workspace`` announced.

        The plan hands all kernels of one thread the same bytes, because only one of them runs at a time; content does not
        survive a call.
        """
        spec = TensorSpec(tuple(shape), np.dtype(dtype))
        return self._memory[offset : offset + spec.nbytes].view(spec.dtype).reshape(spec.shape)


class Op(ABC):
    """An operation. Instances do not exist: the class is the entry in the registry, all methods are static or class ones.

    ``attributes``: names of all that a node of the op may be given; the graph refuses others, which would have no effect.
    ``inplace``: pairs (input, output) that may share memory where their specs are equal, because element i of the output
    depends on no other element of that input that is written before it is read. The plan decides whether they do.
    ``alias``: output 0 *is* input 0's memory under another shape (Reshape, Identity, Assign); ``compile`` returns None
    unless the op changes that memory (Assign).
    ``resident``: the outputs are not planned: ``memory`` gives arrays that outlive the step (Variable, Constant). They
    are never reused nor written in place, except by ops that name them in ``mutates``.
    ``mutates``: inputs whose memory the op changes. Each must be a variable (or an alias of one), and the op runs on
    that variable's device. On one device reads and writes of a variable keep the order in which the nodes were added;
    ``partition`` adds the control edges for it.
    ``stateful``: never folded or merged with an equal node; runs once a step.
    ``asynchronous``: the compiled call returns a Future, and the executor does other work until it is done (a wait for
    other replicas holds no thread). Inputs and outputs of the call stay untouched by others until then.
    """

    name: ClassVar[str]
    attributes: ClassVar[tuple[str, ...]] = ()
    inplace: ClassVar[tuple[tuple[int, int], ...]] = ()
    alias: ClassVar[bool] = False
    resident: ClassVar[bool] = False
    mutates: ClassVar[tuple[int, ...]] = ()
    stateful: ClassVar[bool] = False
    asynchronous: ClassVar[bool] = False

    @staticmethod
    @abstractmethod
    def infer(inputs: Sequence[TensorSpec], attrs: Attrs) -> list[TensorSpec]:
        """Specs of the outputs; ShapeError (the graph adds the node's name and input specs) if inputs do not fit."""

    @staticmethod
    def compile(
        inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], attrs: Attrs, context: KernelContext
    ) -> Call | None:
        """A call without arguments that reads ``inputs`` and fills ``outputs``; None if there is nothing to do.

        Compiled once, called each step, allocates nothing large. All arrays are C-contiguous and stay where they are.
        """
        raise NotImplementedError

    @staticmethod
    def memory(attrs: Attrs, resources: Any) -> Sequence[np.ndarray]:
        """The output arrays of a ``resident`` op, C-contiguous, created in ``resources`` if they are absent."""
        raise NotImplementedError

    @staticmethod
    def workspace(inputs: Sequence[TensorSpec], attrs: Attrs, threads: int) -> int:
        """Bytes of temporary memory that ``compile`` will take from its context."""
        return 0

    @staticmethod
    def gradient(graph: Graph, node: Node, grads: Sequence[Output | None]) -> Sequence[Output | None]:
        """Gradient nodes for each input, given one for each output (None: no gradient flows). Builds graph nodes."""
        raise GraphError("has no gradient")

    @staticmethod
    def cost(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], attrs: Attrs) -> Cost:
        """By default one FLOP an output element, and each input and output touched once."""
        return Cost(sum(spec.size for spec in outputs), sum(spec.nbytes for spec in (*inputs, *outputs)))


class Passive(Op):
    """An op that does nothing in a step: its outputs are there, or are another's memory, or there are none."""

    @staticmethod
    def compile(
        inputs: Sequence[np.ndarray], outputs: Sequence[np.ndarray], attrs: Attrs, context: KernelContext
    ) -> Call | None:
        return None

    @staticmethod
    def cost(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], attrs: Attrs) -> Cost:
        return Cost(0, 0)


def normal_attrs(attrs: Attrs) -> dict[str, Any]:
    """Attributes in the forms that a serialised graph can hold; GraphError names one that has none.

    None, bool, int, float, str, dtype, array (copied and made read-only), and tuples of int or of float. Lists become
    tuples, numpy scalars Python ones.
    """
    return {key: _normal(key, value) for key, value in attrs.items()}


def _normal(key: str, value: Any) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, np.ndarray):
        TensorSpec.of(value)
        if value.flags.writeable or not value.flags.c_contiguous or not value.dtype.isnative:
            value = np.array(value, value.dtype.newbyteorder("="), order="C", copy=True)
            value.flags.writeable = False
        return value
    if isinstance(value, np.dtype | type):
        return dtype_of(value)
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, int | np.integer):
        if not _INT64.min <= value <= _INT64.max:
            raise GraphError(f"attribute {key}={value} does not fit 64 bits")
        return int(value)
    if isinstance(value, float | np.floating):
        return float(value)
    if isinstance(value, list | tuple):
        if all(isinstance(item, int | np.integer) for item in value):
            return tuple(int(item) for item in value)
        if all(isinstance(item, int | float | np.integer | np.floating) for item in value):
            return tuple(float(item) for item in value)
    raise GraphError(
        f"attribute {key}={value!r} cannot be stored in a graph (numbers, strings, dtypes, arrays, tuples of numbers)"
    )


_INT64 = np.iinfo(np.int64)
_REGISTRY: dict[str, type[Op]] = {}


def register(cls: type[Op]) -> type[Op]:
    """Class decorator: enter an op under its ``name`` (the class's own name if it states none)."""
    name = cls.__dict__.get("name", cls.__name__)
    cls.name = name
    if name in _REGISTRY:
        raise GraphError(f"op {name!r} is registered twice")
    _REGISTRY[name] = cls
    return cls


def op_class(name: str) -> type[Op]:
    """The op registered under ``name``; GraphError lists near matches on a miss."""
    cls = _REGISTRY.get(name)
    if cls is None:
        near = difflib.get_close_matches(name, _REGISTRY, 3)
        hint = f"did you mean {', '.join(near)}?" if near else f"known: {', '.join(sorted(_REGISTRY))}"
        raise GraphError(f"unknown op {name!r}; {hint}")
    return cls


def known_ops() -> list[str]:
    return sorted(_REGISTRY)
