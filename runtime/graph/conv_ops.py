"""Convolution of NHWC images; filters are [height, width, in, out], as TensorFlow's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runtime.errors import ShapeError
from runtime.graph.graph import Graph, Node, Output
from runtime.graph.images import Arrays, Specs, check_images, pair, resolved_padding, touched, workspace_of
from runtime.graph.math_ops import check_count, check_same_dtype
from runtime.graph.ops import Attrs, Call, Cost, KernelContext, Op, register
from runtime.kernels import convolution, winograd
from runtime.kernels.window import Window, make_window
from runtime.tensor import TensorSpec


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


def _geometry(node: Node) -> dict[str, Any]:
    return {"stride": node.attrs["stride"], "padding": node.attrs["padding"]}


@register
class Conv2D(Op):
    """Cross-correlation of images with a filter. Inputs: images, filter."""

    attributes = ("stride", "padding")

    @staticmethod
    def infer(inputs: Specs, attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 2)
        check_images(inputs[0])
        check_same_dtype(inputs)
        return [_convolution_out(inputs[0], inputs[1].shape, attrs)]

    @staticmethod
    def workspace(inputs: Specs, attrs: Attrs, threads: int) -> int:
        x, w = inputs
        window, (_, _, channels, outputs) = _convolution_window(x.shape, w.shape, attrs), w.shape
        scheme = winograd.chosen(window, x.shape[0], channels, outputs, x.dtype.itemsize)
        if scheme is not None:
            return winograd.forward_workspace(scheme, window, x.shape[0], channels, outputs, x.dtype.itemsize, threads)
        return convolution.forward_workspace(window, x.shape[0], channels, x.dtype.itemsize, threads)

    @staticmethod
    def compile(inputs: Arrays, outputs: Arrays, attrs: Attrs, context: KernelContext) -> Call | None:
        (x, w), (y,) = inputs, outputs
        window = _convolution_window(x.shape, w.shape, attrs)
        memory = workspace_of(Conv2D, inputs, attrs, context)
        scheme = winograd.chosen(window, x.shape[0], w.shape[2], w.shape[3], x.itemsize)
        if scheme is not None:
            return winograd.compile_forward(scheme, x, w, y, window, context.threads, memory)
        return convolution.compile_forward(x, w.reshape(-1, w.shape[3]), y, window, context.threads, memory)

    @staticmethod
    def gradient(graph: Graph, node: Node, grads: Sequence[Output | None]) -> Sequence[Output | None]:
        x, w = node.inputs
        (g,) = grads
        assert g is not None
        return [
            graph.add("Conv2DBackpropInput", w, g, shape=x.shape, **_geometry(node)).out,
            graph.add("Conv2DBackpropFilter", x, g, shape=w.shape, **_geometry(node)).out,
        ]

    @staticmethod
    def cost(inputs: Specs, outputs: Specs, attrs: Attrs) -> Cost:
        return Cost(_convolution_flops(outputs[0], inputs[1].shape), touched((*inputs, *outputs)))


@register
class Conv2DBackpropInput(Op):
    """Gradient of Conv2D for its images, which have ``shape``. Inputs: filter, gradient of the output."""

    attributes = ("stride", "padding", "shape")

    @staticmethod
    def infer(inputs: Specs, attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 2)
        check_same_dtype(inputs)
        images = TensorSpec(tuple(attrs["shape"]), inputs[0].dtype)
        check_images(images)
        expected = _convolution_out(images, inputs[0].shape, attrs)
        if inputs[1] != expected:
            raise ShapeError(f"the gradient is {inputs[1]}, the convolution gives {expected}")
        return [images]

    @staticmethod
    def workspace(inputs: Specs, attrs: Attrs, threads: int) -> int:
        w, shape = inputs[0], tuple(attrs["shape"])
        window, (_, _, channels, outputs) = _convolution_window(shape, w.shape, attrs), w.shape
        scheme = winograd.chosen_turned(window, shape[0], channels, outputs, w.dtype.itemsize)
        if scheme is not None:
            return winograd.input_workspace(scheme, window, shape[0], channels, outputs, w.dtype.itemsize, threads)
        return convolution.input_workspace(window, shape[0], channels, outputs, w.dtype.itemsize, threads)

    @staticmethod
    def compile(inputs: Arrays, outputs: Arrays, attrs: Attrs, context: KernelContext) -> Call | None:
        (w, dy), (dx,) = inputs, outputs
        window = _convolution_window(dx.shape, w.shape, attrs)
        memory = workspace_of(Conv2DBackpropInput, inputs, attrs, context)
        scheme = winograd.chosen_turned(window, dx.shape[0], w.shape[2], w.shape[3], w.itemsize)
        if scheme is not None:
            return winograd.compile_input_gradient(scheme, w, dy, dx, window, context.threads, memory)
        return convolution.compile_input_gradient(w, dy, dx, window, context.threads, memory)

    @staticmethod
    def gradient(graph: Graph, node: Node, grads: Sequence[Output | None]) -> Sequence[Output | None]:
        w, dy = node.inputs
        (g,) = grads
        assert g is not None
        return [
            graph.add("Conv2DBackpropFilter", g, dy, shape=w.shape, **_geometry(node)).out,
            graph.add("Conv2D", g, w, **_geometry(node)).out,
        ]

    @staticmethod
    def cost(inputs: Specs, outputs: Specs, attrs: Attrs) -> Cost:
        return Cost(_convolution_flops(inputs[1], inputs[0].shape), touched((*inputs, *outputs)))


@register
class Conv2DBackpropFilter(Op):
    """Gradient of Conv2D for its filter, which has ``shape``. Inputs: images, gradient of the output."""

    attributes = ("stride", "padding", "shape")

    @staticmethod
    def infer(inputs: Specs, attrs: Attrs) -> list[TensorSpec]:
        check_count(inputs, 2)
        check_images(inputs[0])
        check_same_dtype(inputs)
        expected = _convolution_out(inputs[0], tuple(attrs["shape"]), attrs)
        if inputs[1] != expected:
            raise ShapeError(f"the gradient is {inputs[1]}, the convolution gives {expected}")
        return [TensorSpec(tuple(attrs["shape"]), inputs[0].dtype)]

    @staticmethod
    def workspace(inputs: Specs, attrs: Attrs, threads: int) -> int:
        x, shape = inputs[0], tuple(attrs["shape"])
        window, (_, _, channels, outputs) = _convolution_window(x.shape, shape, attrs), shape
        sizes = (window, x.shape[0], channels, outputs)
        scheme = winograd.chosen(*sizes, x.dtype.itemsize)
        if scheme is not None:
            return winograd.filter_workspace(scheme, *sizes, x.dtype.itemsize, threads)
        return convolution.filter_workspace(*sizes, x.dtype.itemsize, threads)

    @staticmethod
    def compile(inputs: Arrays, outputs: Arrays, attrs: Attrs, context: KernelContext) -> Call | None:
        (x, dy), (dw,) = inputs, outputs
        window = _convolution_window(x.shape, dw.shape, attrs)
        memory = workspace_of(Conv2DBackpropFilter, inputs, attrs, context)
        scheme = winograd.chosen(window, x.shape[0], dw.shape[2], dw.shape[3], x.itemsize)
        if scheme is not None:
            return winograd.compile_filter_gradient(scheme, x, dy, dw, window, context.threads, memory)
        return convolution.compile_filter_gradient(x, dy, dw, window, context.threads, memory)

    @staticmethod
    def gradient(graph: Graph, node: Node, grads: Sequence[Output | None]) -> Sequence[Output | None]:
        x, dy = node.inputs
        (g,) = grads
        assert g is not None
        return [
            graph.add("Conv2DBackpropInput", g, dy, shape=x.shape, **_geometry(node)).out,
            graph.add("Conv2D", x, g, **_geometry(node)).out,
        ]

    @staticmethod
    def cost(inputs: Specs, outputs: Specs, attrs: Attrs) -> Cost:
        return Cost(_convolution_flops(inputs[1], tuple(attrs["shape"])), touched((*inputs, *outputs)))


def conv2d(
    images: Output,
    filters: Output,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = "SAME",
    name: str | None = None,
) -> Output:
    """``images`` [n, h, w, c] with ``filters`` [kh, kw, c, o] -> [n, oh, ow, o]. ``padding``: SAME, VALID, one size for all
    sides, or (top, bottom, left, right)."""
    steps = pair(stride)
    kernel = (filters.shape[0], filters.shape[1]) if len(filters.shape) == 4 else (1, 1)
    pads = resolved_padding(images, kernel, steps, padding)
    return images.graph.add("Conv2D", images, filters, name=name, stride=steps, padding=pads).out
