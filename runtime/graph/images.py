"""What ops on images have in common: their shape, their windows' geometry, and their kernels' temporary memory.

A node holds its geometry resolved: ``stride`` (2 sizes), ``padding`` (top, bottom, left, right). The functions that build
nodes also take one size for both directions and "SAME" or "VALID".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from runtime.errors import ShapeError
from runtime.graph.graph import Output
from runtime.graph.math_ops import check_floating
from runtime.graph.ops import Attrs, KernelContext, Op
from runtime.kernels.window import make_window
from runtime.tensor import TensorSpec

Specs = Sequence[TensorSpec]
Arrays = Sequence[np.ndarray]


def check_images(spec: TensorSpec) -> None:
    """ShapeError unless ``spec`` is one of NHWC images, of a floating dtype."""
    if len(spec.shape) != 4:
        raise ShapeError(f"images must be [batch, height, width, channels], not of shape {spec.shape}")
    check_floating(spec)


def touched(specs: Specs) -> int:
    """Bytes of all these tensors."""
    return sum(spec.nbytes for spec in specs)


def workspace_of(op: type[Op], inputs: Arrays, attrs: Attrs, context: KernelContext) -> np.ndarray:
    """All the temporary memory that ``op`` announced, as bytes."""
    size = op.workspace([TensorSpec.of(array) for array in inputs], attrs, context.threads)
    return context.workspace((size,), np.uint8)


def pair(size: int | Sequence[int]) -> tuple[int, int]:
    """One size for both directions, or two, as two."""
    if isinstance(size, int):
        return size, size
    first, second = size
    return int(first), int(second)


def resolved_padding(images: Output, kernel: tuple[int, int], stride: tuple[int, int], padding: Any) -> Any:
    """The four sizes that "SAME" or "VALID" mean here; what cannot be resolved is left for ``infer`` to report."""
    if isinstance(padding, int):
        return (padding,) * 4
    if padding not in ("SAME", "VALID") or len(images.shape) != 4 or min(*kernel, *stride) < 1:
        return padding if isinstance(padding, str) else tuple(padding)
    try:
        return make_window(images.shape[1], images.shape[2], kernel, stride, padding).padding
    except ShapeError:
        return padding
