"""Pooling of NHWC images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from runtime.errors import ShapeError
from runtime.graph.graph import Graph, Node, Output
from runtime.graph.images import Arrays, Specs, check_images, pair, resolved_padding, touched, workspace_of
from runtime.graph.math_ops import check_count
from runtime.graph.ops import Attrs, Call, Cost, KernelContext, Op, register
from runtime.kernels import pooling
from runtime.kernels.window import Window, make_window
from runtime.tensor import TensorSpec


def _pooling_window(images: tuple[int, ...], attrs: Attrs) -> Window:
    window = make_window(images[1], images[2], tuple(attrs["kernel"]), tuple(attrs["stride"]), attrs["padding"])
    (kh, kw), (top, bottom, left, right) = window.kernel, window.padding
    if max(top, bottom) >= kh or max(left, right) >= kw:
        raise ShapeError(
            f"padding {window.padding} is not smaller than the window {window.kernel}, which may miss the image"
        )
    return window


def _pooling_out(images: TensorSpec, attrs: Attrs) -> TensorSpec:
    window = _pooling_window(images.shape, attrs)
    return TensorSpec((images.shape[0], window.out_height, window.out_width, images.shape[3]), images.dtype)


def _pooling_cost(pooled: TensorSpec, inputs: Specs, outputs: Specs, attrs: Attrs) -> Cost:
    """An operation for each element of each window of ``pooled``, forward or backward."""
    rows, columns = attrs["kernel"]
    return Cost(rows * columns * pooled.size, touched((*inputs, *outputs)))


class _Pool(Op):
    """Input: images."""

    attributes: ClassVar[tuple[str, ...]] = ("kernel", "stride", "padding")

    @staticmethod
    def infer(inputs: Specs, attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 1)
        check_images(inputs[0])
        return [_pooling_out(inputs[0], attrs)]

    @staticmethod
    def workspace(inputs: Specs, attrs: Attrs, threads: int) -> int:
        (x,) = inputs
        window = _pooling_window(x.shape, attrs)
        return pooling.forward_workspace(window, x.shape[0], x.shape[3], x.dtype.itemsize, threads)

    @staticmethod
    def cost(inputs: Specs, outputs: Specs, attrs: Attrs) -> Cost:
        return _pooling_cost(outputs[0], inputs, outputs, attrs)


def _geometry(node: Node) -> dict[str, Any]:
    return {key: node.attrs[key] for key in ("kernel", "stride", "padding")}


@register
class MaxPool(_Pool):
    """The largest element of each window; padding never wins."""

    @staticmethod
    def compile(inputs: Arrays, outputs: Arrays, attrs: Attrs, context: KernelContext) -> Call | None:
        window = _pooling_window(inputs[0].shape, attrs)
        memory = workspace_of(MaxPool, inputs, attrs, context)
        return pooling.compile_max(inputs[0], outputs[0], window, context.threads, memory)

    @staticmethod
    def gradient(graph: Graph, node: Node, grads: Sequence[Output | None]) -> Sequence[Output | None]:
        assert grads[0] is not None
        return [graph.add("MaxPoolGrad", node.inputs[0], node.out, grads[0], **_geometry(node)).out]


@register
class MaxPoolGrad(Op):
    """Gradient of MaxPool: all of a window's goes to one of its maxima. Inputs: images, pooled, gradient of it."""

    attributes = ("kernel", "stride", "padding")

    @staticmethod
    def infer(inputs: Specs, attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 3)
        check_images(inputs[0])
        expected = _pooling_out(inputs[0], attrs)
        if inputs[1] != expected or inputs[2] != expected:
            raise ShapeError(f"pooled is {inputs[1]} and its gradient {inputs[2]}, the pooling gives {expected}")
        return [inputs[0]]

    @staticmethod
    def workspace(inputs: Specs, attrs: Attrs, threads: int) -> int:
        x = inputs[0]
        window = _pooling_window(x.shape, attrs)
        return pooling.max_gradient_workspace(window, x.shape[0], x.shape[3], x.dtype.itemsize, threads)

    @staticmethod
    def compile(inputs: Arrays, outputs: Arrays, attrs: Attrs, context: KernelContext) -> Call | None:
        (x, y, dy), (dx,) = inputs, outputs
        memory = workspace_of(MaxPoolGrad, inputs, attrs, context)
        return pooling.compile_max_gradient(x, y, dy, dx, _pooling_window(x.shape, attrs), context.threads, memory)

    @staticmethod
    def cost(inputs: Specs, outputs: Specs, attrs: Attrs) -> Cost:
        return _pooling_cost(inputs[1], inputs, outputs, attrs)


@register
class AvgPool(_Pool):
    """The mean of each window, over what lies inside of the image."""

    @staticmethod
    def compile(inputs: Arrays, outputs: Arrays, attrs: Attrs, context: KernelContext) -> Call | None:
        window = _pooling_window(inputs[0].shape, attrs)
        memory = workspace_of(AvgPool, inputs, attrs, context)
        return pooling.compile_average(inputs[0], outputs[0], window, context.threads, memory)

    @staticmethod
    def gradient(graph: Graph, node: Node, grads: Sequence[Output | None]) -> Sequence[Output | None]:
        assert grads[0] is not None
        return [graph.add("AvgPoolGrad", grads[0], shape=node.inputs[0].shape, **_geometry(node)).out]


@register
class AvgPoolGrad(Op):
    """Gradient of AvgPool for its images, which have ``shape``. Input: gradient of the output."""

    attributes = ("kernel", "stride", "padding", "shape")

    @staticmethod
    def infer(inputs: Specs, attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 1)
        images = TensorSpec(tuple(attrs["shape"]), inputs[0].dtype)
        check_images(images)
        expected = _pooling_out(images, attrs)
        if inputs[0] != expected:
            raise ShapeError(f"the gradient is {inputs[0]}, the pooling gives {expected}")
        return [images]

    @staticmethod
    def workspace(inputs: Specs, attrs: Attrs, threads: int) -> int:
        shape = tuple(attrs["shape"])
        window = _pooling_window(shape, attrs)
        return pooling.average_gradient_workspace(window, shape[0], shape[3], inputs[0].dtype.itemsize, threads)

    @staticmethod
    def compile(inputs: Arrays, outputs: Arrays, attrs: Attrs, context: KernelContext) -> Call | None:
        window = _pooling_window(outputs[0].shape, attrs)
        memory = workspace_of(AvgPoolGrad, inputs, attrs, context)
        return pooling.compile_average_gradient(inputs[0], outputs[0], window, context.threads, memory)

    @staticmethod
    def gradient(graph: Graph, node: Node, grads: Sequence[Output | None]) -> Sequence[Output | None]:
        assert grads[0] is not None
        return [graph.add("AvgPool", grads[0], **_geometry(node)).out]

    @staticmethod
    def cost(inputs: Specs, outputs: Specs, attrs: Attrs) -> Cost:
        return _pooling_cost(inputs[0], inputs, outputs, attrs)


def max_pool(
    images: Output,
    kernel: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: str | int | Sequence[int] = "VALID",
    name: str | None = None,
) -> Output:
    """The largest element of each window of ``kernel``; ``stride`` is the kernel's size if not given."""
    return _pool("MaxPool", images, kernel, stride, padding, name)


def avg_pool(
    images: Output,
    kernel: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: str | int | Sequence[int] = "VALID",
    name: str | None = None,
) -> Output:
    """The mean of each window of ``kernel``, padding not counted; ``stride`` is the kernel's size if not given."""
    return _pool("AvgPool", images, kernel, stride, padding, name)


def _pool(op: str, images: Output, kernel: Any, stride: Any, padding: Any, name: str | None) -> Output:
    size = pair(kernel)
    steps = size if stride is None else pair(stride)
    pads = resolved_padding(images, size, steps, padding)
    return images.graph.add(op, images, name=name, kernel=size, stride=steps, padding=pads).out


def global_avg_pool(images: Output, name: str | None = None) -> Output:
    """[n, h, w, c] -> [n, c]: the mean of each channel."""
    pooled = avg_pool(images, images.shape[1:3], 1, "VALID")
    return images.graph.add("Reshape", pooled, name=name, shape=(images.shape[0], images.shape[3])).out
