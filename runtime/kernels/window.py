"""A window that slides over images: the geometry that convolution and pooling share, and how work on it is cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from runtime.errors import ShapeError
from runtime.kernels.parallel import split


@dataclass(frozen=True, slots=True)
class Window:
    """A window over images of ``height`` x ``width``; ``padding`` is top, bottom, left, right."""

    height: int
    width: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int, int, int]

    @property
    def out_height(self) -> int:
        return (self.height + self.padding[0] + self.padding[1] - self.kernel[0]) // self.stride[0] + 1

    @property
    def out_width(self) -> int:
        return (self.width + self.padding[2] + self.padding[3] - self.kernel[1]) // self.stride[1] + 1

    @property
    def padded(self) -> bool:
        return any(self.padding)

    @property
    def trivial(self) -> bool:
        """Whether every patch is one pixel and every pixel one patch."""
        return self.kernel == (1, 1) and self.stride == (1, 1) and not self.padded

    @property
    def turned(self) -> Window:
        """The window of the gradient with respect to the input, for stride 1 and padding smaller than the kernel."""
        (kh, kw), (top, bottom, left, right) = self.kernel, self.padding
        padding = (kh - 1 - top, kh - 1 - bottom, kw - 1 - left, kw - 1 - right)
        return Window(self.out_height, self.out_width, self.kernel, (1, 1), padding)

    def rows(self, offset: int, start: int = 0, stop: int | None = None) -> tuple[slice, slice]:
        """Output rows in [start, stop) whose window's row ``offset`` lies in the image, and those rows of the image."""
        stop = self.out_height if stop is None else stop
        return _overlap(self.height, self.stride[0], offset - self.padding[0], start, stop)

    def columns(self, offset: int) -> tuple[slice, slice]:
        """As ``rows``, for all columns."""
        return _overlap(self.width, self.stride[1], offset - self.padding[2], 0, self.out_width)


def _overlap(size: int, stride: int, offset: int, start: int, stop: int) -> tuple[slice, slice]:
    low = max(start, -(offset // stride))
    high = max(low, min(stop, (size - 1 - offset) // stride + 1))
    begin = low * stride + offset
    return slice(low, high), slice(begin, begin + max(0, (high - low - 1) * stride + 1), stride)


def make_window(
    height: int, width: int, kernel: tuple[int, int], stride: tuple[int, int], padding: str | Sequence[int]
) -> Window:
    """``padding``: "VALID", "SAME" (TensorFlow's: the odd one goes to the bottom and right), or (top, bottom, left, right)."""
    if min(*kernel, *stride) < 1:
        raise ShapeError(f"kernel {kernel} and stride {stride} must be positive")
    if padding == "VALID":
        pads = (0, 0, 0, 0)
    elif padding == "SAME":
        rows = max(0, (-(-height // stride[0]) - 1) * stride[0] + kernel[0] - height)
        columns = max(0, (-(-width // stride[1]) - 1) * stride[1] + kernel[1] - width)
        pads = (rows // 2, rows - rows // 2, columns // 2, columns - columns // 2)
    elif not isinstance(padding, str) and len(padding) == 4 and min(padding) >= 0:
        top, bottom, left, right = padding
        pads = (int(top), int(bottom), int(left), int(right))
    else:
        raise ShapeError(f"padding {padding!r} is not VALID, SAME or four sizes (top, bottom, left, right)")
    if height + pads[0] + pads[1] < kernel[0] or width + pads[2] + pads[3] < kernel[1]:
        raise ShapeError(f"a window of {kernel} is larger than the image of {height} x {width} with padding {pads}")
    return Window(height, width, kernel, stride, pads)


class Piece(NamedTuple):
    """Output rows [top, bottom) of images [first, last)."""

    first: int
    last: int
    top: int
    bottom: int


def pieces(window: Window, batch: int, position_bytes: int, threads: int, limit: int) -> list[Piece]:
    """Cut the output so that a piece takes about ``limit`` bytes, at ``position_bytes`` an output position, and every thread
    gets as many pieces."""
    rows, image = window.out_height, max(1, window.out_height * window.out_width * position_bytes)
    if batch == 0:
        return []
    if image <= limit and batch >= threads:
        count = -(-batch // max(1, limit // image))
        count = min(batch, -(-count // threads) * threads)
        return [Piece(first, last, 0, rows) for first, last in split(batch, count)]
    count = max(-(-image // limit), -(-threads // batch))
    return [Piece(first, first + 1, top, bottom) for first in range(batch) for top, bottom in split(rows, count)]


def groups(window: Window, batch: int, position_bytes: int, threads: int, limit: int) -> list[list[Piece]]:
    """Pieces grouped so that a group has some images to itself, for work that overlaps between rows of an image."""
    found: dict[int, list[Piece]] = {}
    for piece in pieces(window, batch, position_bytes, max(1, min(threads, batch)), limit):
        found.setdefault(piece.first, []).append(piece)
    return list(found.values())
