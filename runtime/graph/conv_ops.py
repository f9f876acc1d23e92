"""Convolution and pooling of NHWC images; filters are [height, width, in, out], as TensorFlow's.

A node holds its geometry resolved: ``stride`` (2 sizes), ``padding`` (top, bottom, left, right). The functions at the end
also take one size for both directions and "SAME" or "VALID".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from runtime.errors import ShapeError
from runtime.graph.graph import Graph, Node, Output
from runtime.graph.math_ops import check_count, check_floating, check_same_dtype
from runtime.graph.ops import Attrs, Call, Cost, KernelContext, Op, register
from runtime.kernels import convolution, pooling, winograd
from runtime.kernels.window import Window, make_window
from runtime.tensor import TensorSpec

Specs = Sequence[TensorSpec]
Arrays = Sequence[np.ndarray]


def _check_images(spec: TensorSpec) -> None:
    if len(spec.shape) != 4:
        raise ShapeError(f"images must be [batch, height, width, channels], not of shape {spec.shape}")
    check_floating(spec)


def _convolution_window(images: tuple[int, ...], filters: tuple[int, ...], attrs: Attrs) -> Window:
    if len(filters) != 4:
        raise ShapeError(f"a filter must be [height, width, in, out], not of shape {filters}")
    if images[3] != filters[2]:
        raise ShapeError(f"images have {images[3]} channels, the filter {filters} takes {filters[2]}")
    return make_window(images[1], images[2], (filters[0], filters[1]), tuple(attrs["stride"]), attrs["padding"])


def _convolution_out(images: TensorSpec, filters: tuple[int, ...], attrs: Attrs) -> TensorSpec:
    window = _convolution_window(images.shape, filters, attrs)
    return TensorSpec((images.shape[0], window.out_height, window.out_width, filters[3]), images.dtype)


def _convolution_flops(out: TensorSpec, filters: tuple[int, ...]) -> int:
    return 2 * out.size * filters[0] * filters[1] * filters[2]


def _touched(specs: Sequence[TensorSpec]) -> int:
    return sum(spec.nbytes for spec in specs)


def _memory(op: type[Op], inputs: Arrays, attrs: Attrs, context: KernelContext) -> np.ndarray:
    """All the temporary memory that ``op`` announced, as bytes."""
    size = op.workspace([TensorSpec.of(array) for array in inputs], attrs, context.threads)
    return context.workspace((size,), np.uint8)


@register
class Conv2D(Op):
    """Cross-correlation of images with a filter. Inputs: images, filter."""

    attributes = ("stride", "padding")

    @staticmethod
    def infer(inputs: Specs, attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 2)
        _check_images(inputs[0])
        check_same_dtype(inputs)
        return [_convolution_out(inputs[0], inputs[1].shape, attrs)]

    @staticmethod
    def workspace(inputs: Specs, attrs: Attrs, threads: int) -> int:
        x, w = inputs
        window, (_, _, channels, outputs) = _convolution_window(x.shape, w.shape, attrs), w.shape
        if winograd.applies(window, channels, outputs):
            return winograd.forward_workspace(window, x.shape[0], channels, outputs, x.dtype.itemsize, threads)
        return convolution.forward_workspace(window, x.shape[0], channels, x.dtype.itemsize, threads)

    @staticmethod
    def compile(inputs: Arrays, outputs: Arrays, attrs: Attrs, context: KernelContext) -> Call | None:
        (x, w), (y,) = inputs, outputs
        window = _convolution_window(x.shape, w.shape, attrs)
        memory = _memory(Conv2D, inputs, attrs, context)
        if winograd.applies(window, w.shape[2], w.shape[3]):
            return winograd.compile_forward(x, w, y, window, context.threads, memory)
        return convolution.compile_forward(x, w.reshape(-1, w.shape[3]), y, window, context.threads, memory)

    @staticmethod
    def gradient(graph: Graph, node: Node, grads: Sequence[Output | None]) -> Sequence[Output | None]:
        x, w = node.inputs
        (g,) = grads
        assert g is not None
        geometry = {"stride": node.attrs["stride"], "padding": node.attrs["padding"]}
        return [
            graph.add("Conv2DBackpropInput", w, g, shape=x.shape, **geometry).out,
            graph.add("Conv2DBackpropFilter", x, g, shape=w.shape, **geometry).out,
        ]

    @staticmethod
    def cost(inputs: Specs, outputs: Specs, attrs: Attrs) -> Cost:
        return Cost(_convolution_flops(outputs[0], inputs[1].shape), _touched((*inputs, *outputs)))


@register
class Conv2DBackpropInput(Op):
    """Gradient of Conv2D for its images, which have ``shape``. Inputs: filter, gradient of the output."""

    attributes = ("stride", "padding", "shape")

    @staticmethod
    def infer(inputs: Specs, attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 2)
        check_same_dtype(inputs)
        images = TensorSpec(tuple(attrs["shape"]), inputs[0].dtype)
        _check_images(images)
        expected = _convolution_out(images, inputs[0].shape, attrs)
        if inputs[1] != expected:
            raise ShapeError(f"the gradient is {inputs[1]}, the convolution gives {expected}")
        return [images]

    @staticmethod
    def workspace(inputs: Specs, attrs: Attrs, threads: int) -> int:
        w, shape = inputs[0], tuple(attrs["shape"])
        window, (_, _, channels, outputs) = _convolution_window(shape, w.shape, attrs), w.shape
        if winograd.applies(window, channels, outputs):
            return winograd.forward_workspace(window.turned, shape[0], outputs, channels, w.dtype.itemsize, threads)
        return convolution.input_workspace(window, shape[0], channels, outputs, w.dtype.itemsize, threads)

    @staticmethod
    def compile(inputs: Arrays, outputs: Arrays, attrs: Attrs, context: KernelContext) -> Call | None:
        (w, dy), (dx,) = inputs, outputs
        window = _convolution_window(dx.shape, w.shape, attrs)
        memory = _memory(Conv2DBackpropInput, inputs, attrs, context)
        if winograd.applies(window, w.shape[2], w.shape[3]):
            return winograd.compile_input_gradient(w, dy, dx, window, context.threads, memory)
        return convolution.compile_input_gradient(w, dy, dx, window, context.threads, memory)

    @staticmethod
    def gradient(graph: Graph, node: Node, grads: Sequence[Output | None]) -> Sequence[Output | None]:
        w, dy = node.inputs
        (g,) = grads
        assert g is not None
        geometry = {"stride": node.attrs["stride"], "padding": node.attrs["padding"]}
        return [
            graph.add("Conv2DBackpropFilter", g, dy, shape=w.shape, **geometry).out,
            graph.add("Conv2D", g, w, **geometry).out,
        ]

    @staticmethod
    def cost(inputs: Specs, outputs: Specs, attrs: Attrs) -> Cost:
        return Cost(_convolution_flops(inputs[1], inputs[0].shape), _touched((*inputs, *outputs)))


@register
class Conv2DBackpropFilter(Op):
    """Gradient of Conv2D for its filter, which has ``shape``. Inputs: images, gradient of the output."""

    attributes = ("stride", "padding", "shape")

    @staticmethod
    def infer(inputs: Specs, attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 2)
        _check_images(inputs[0])
        check_same_dtype(inputs)
        expected = _convolution_out(inputs[0], tuple(attrs["shape"]), attrs)
        if inputs[1] != expected:
            raise ShapeError(f"the gradient is {inputs[1]}, the convolution gives {expected}")
        return [TensorSpec(tuple(attrs["shape"]), inputs[0].dtype)]

    @staticmethod
    def workspace(inputs: Specs, attrs: Attrs, threads: int) -> int:
        x, shape = inputs[0], tuple(attrs["shape"])
        window, (_, _, channels, outputs) = _convolution_window(x.shape, shape, attrs), shape
        kernels = winograd if winograd.applies(window, channels, outputs) else convolution
        return kernels.filter_workspace(window, x.shape[0], channels, outputs, x.dtype.itemsize, threads)

    @staticmethod
    def compile(inputs: Arrays, outputs: Arrays, attrs: Attrs, context: KernelContext) -> Call | None:
        (x, dy), (dw,) = inputs, outputs
        window = _convolution_window(x.shape, dw.shape, attrs)
        memory = _memory(Conv2DBackpropFilter, inputs, attrs, context)
        kernels = winograd if winograd.applies(window, dw.shape[2], dw.shape[3]) else convolution
        return kernels.compile_filter_gradient(x, dy, dw, window, context.threads, memory)

    @staticmethod
    def gradient(graph: Graph, node: Node, grads: Sequence[Output | None]) -> Sequence[Output | None]:
        x, dy = node.inputs
        (g,) = grads
        assert g is not None
        geometry = {"stride": node.attrs["stride"], "padding": node.attrs["padding"]}
        return [
            graph.add("Conv2DBackpropInput", g, dy, shape=x.shape, **geometry).out,
            graph.add("Conv2D", x, g, **geometry).out,
        ]

    @staticmethod
    def cost(inputs: Specs, outputs: Specs, attrs: Attrs) -> Cost:
        return Cost(_convolution_flops(inputs[1], tuple(attrs["shape"])), _touched((*inputs, *outputs)))


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


class _Pool(Op):
    """Input: images."""

    attributes: ClassVar[tuple[str, ...]] = ("kernel", "stride", "padding")

    @staticmethod
    def infer(inputs: Specs, attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 1)
        _check_images(inputs[0])
        return [_pooling_out(inputs[0], attrs)]

    @staticmethod
    def workspace(inputs: Specs, attrs: Attrs, threads: int) -> int:
        (x,) = inputs
        window = _pooling_window(x.shape, attrs)
        return pooling.forward_workspace(window, x.shape[0], x.shape[3], x.dtype.itemsize, threads)

    @staticmethod
    def cost(inputs: Specs, outputs: Specs, attrs: Attrs) -> Cost:
        rows, columns = attrs["kernel"]
        return Cost(rows * columns * outputs[0].size, _touched((*inputs, *outputs)))


def _geometry(node: Node) -> dict[str, Any]:
    return {key: node.attrs[key] for key in ("kernel", "stride", "padding")}


@register
class MaxPool(_Pool):
    """The largest element of each window; padding never wins."""

    @staticmethod
    def compile(inputs: Arrays, outputs: Arrays, attrs: Attrs, context: KernelContext) -> Call | None:
        window = _pooling_window(inputs[0].shape, attrs)
        memory = _memory(MaxPool, inputs, attrs, context)
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
        _check_images(inputs[0])
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
        memory = _memory(MaxPoolGrad, inputs, attrs, context)
        return pooling.compile_max_gradient(x, y, dy, dx, _pooling_window(x.shape, attrs), context.threads, memory)

    @staticmethod
    def cost(inputs: Specs, outputs: Specs, attrs: Attrs) -> Cost:
        rows, columns = attrs["kernel"]
        return Cost(rows * columns * inputs[1].size, _touched((*inputs, *outputs)))


@register
class AvgPool(_Pool):
    """The mean of each window, over what lies inside of the image."""

    @staticmethod
    def compile(inputs: Arrays, outputs: Arrays, attrs: Attrs, context: KernelContext) -> Call | None:
        window = _pooling_window(inputs[0].shape, attrs)
        memory = _memory(AvgPool, inputs, attrs, context)
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
        _check_images(images)
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
        memory = _memory(AvgPoolGrad, inputs, attrs, context)
        return pooling.compile_average_gradient(inputs[0], outputs[0], window, context.threads, memory)

    @staticmethod
    def gradient(graph: Graph, node: Node, grads: Sequence[Output | None]) -> Sequence[Output | None]:
        assert grads[0] is not None
        return [graph.add("AvgPool", grads[0], **_geometry(node)).out]

    @staticmethod
    def cost(inputs: Specs, outputs: Specs, attrs: Attrs) -> Cost:
        rows, columns = attrs["kernel"]
        return Cost(rows * columns * inputs[0].size, _touched((*inputs, *outputs)))


def _pair(size: int | Sequence[int]) -> tuple[int, int]:
    if isinstance(size, int):
        return size, size
    first, second = size
    return int(first), int(second)


def _resolved(images: Output, kernel: tuple[int, int], stride: tuple[int, int], padding: Any) -> Any:
    """The four sizes that "SAME" or "VALID" mean here; what cannot be resolved is left for ``infer`` to report."""
    if isinstance(padding, int):
        return (padding,) * 4
    if padding not in ("SAME", "VALID") or len(images.shape) != 4 or min(*kernel, *stride) < 1:
        return padding if isinstance(padding, str) else tuple(padding)
    try:
        return make_window(images.shape[1], images.shape[2], kernel, stride, padding).padding
    except ShapeError:
        return padding


def conv2d(
    images: Output,
    filters: Output,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = "SAME",
    name: str | None = None,
) -> Output:
    """``images`` [n, h, w, c] with ``filters`` [kh, kw, c, o] -> [n, oh, ow, o]. ``padding``: SAME, VALID, one size for all
    sides, or (top, bottom, left, right)."""
    steps = _pair(stride)
    kernel = (filters.shape[0], filters.shape[1]) if len(filters.shape) == 4 else (1, 1)
    pads = _resolved(images, kernel, steps, padding)
    return images.graph.add("Conv2D", images, filters, name=name, stride=steps, padding=pads).out


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
    size = _pair(kernel)
    steps = size if stride is None else _pair(stride)
    pads = _resolved(images, size, steps, padding)
    return images.graph.add(op, images, name=name, kernel=size, stride=steps, padding=pads).out


def global_avg_pool(images: Output, name: str | None = None) -> Output:
    """[n, h, w, c] -> [n, c]: the mean of each channel."""
    pooled = avg_pool(images, images.shape[1:3], 1, "VALID")
    return images.graph.add("Reshape", pooled, name=name, shape=(images.shape[0], images.shape[3])).out
