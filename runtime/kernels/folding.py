"""A convolution of stride s as one of stride 1: s x s pixels become one pixel with s * s times the channels ("space to depth").

The filter's taps are folded likewise, after zeros were added to make their number a multiple of s. AlexNet's first layer,
11 x 11 of stride 4 over 3 channels, becomes 3 x 3 over 48, which minimal filtering applies to. The images' padding goes into the
folded ones.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from runtime.kernels.padding import padded_rows
from runtime.kernels.parallel import Call, free_shares, sequence
from runtime.kernels.scratch import Scratch, aligned
from runtime.kernels.window import Window


def is_foldable(window: Window) -> bool:
    """Whether stride and kernel are square, and the stride is one that folding does away with."""
    return window.stride[0] == window.stride[1] > 1 and window.kernel[0] == window.kernel[1] > window.stride[0]


def folded(window: Window) -> Window:
    """The window of stride 1 over the folded images, which hold just what it reads."""
    taps = -(-window.kernel[0] // window.stride[0])
    height, width = window.out_height + taps - 1, window.out_width + taps - 1
    return Window(height, width, (taps, taps), (1, 1), (0, 0, 0, 0))


def workspace(window: Window, batch: int, channels: int, outputs: int, itemsize: int, threads: int) -> int:
    """For folded images, ``threads`` padded ones, a folded filter and a padded one."""
    inner, fold = folded(window), window.stride[0]
    image = inner.height * inner.width * fold * fold * channels * itemsize
    taps = inner.kernel[0] * inner.kernel[1] * fold * fold * channels * outputs * itemsize
    return aligned(batch * image) + threads * aligned(image) + 2 * aligned(taps)


def fold_images(x: np.ndarray, window: Window, threads: int, scratch: Scratch) -> tuple[Call, np.ndarray]:
    """The call that folds ``x[n, h, w, c]``, and the result [n, h', w', s * s * c]."""
    batch, channels = x.shape[0], x.shape[3]
    inner, fold = folded(window), window.stride[0]
    images = scratch.take((batch, inner.height, inner.width, fold * fold * channels), x.dtype)
    padded = (1, inner.height * fold, inner.width * fold, channels)
    spare = [scratch.take(padded, x.dtype) for _ in range(threads)]
    items = []
    for image in range(batch):
        target = images[image].reshape(inner.height, inner.width, fold, fold * channels)
        row = []
        for room in spare:
            calls = padded_rows(x[image : image + 1], -window.padding[0], window.padding[2], room)
            blocks = room.reshape(inner.height, fold, inner.width, fold * channels)
            calls.append(partial(np.copyto, target, blocks.transpose(0, 2, 1, 3)))
            row.append(sequence(calls))
        items.append(row)
    return free_shares(items), images


def fold_filter(w: np.ndarray, window: Window, scratch: Scratch) -> tuple[Call, np.ndarray]:
    """The call that folds ``w[r, r, c, o]``, and the result [r', r', s * s * c, o]."""
    padded, blocks, result = _filter_parts(w, window, scratch)
    kernel = window.kernel[0]
    calls: list[Call] = [
        partial(padded.fill, 0),
        partial(np.copyto, padded[:kernel, :kernel], w),
        partial(np.copyto, result.reshape(blocks.shape), blocks),
    ]
    return sequence(calls), result


def unfold_filter(dw: np.ndarray, window: Window, scratch: Scratch) -> tuple[Call, np.ndarray]:
    """The call that fills ``dw[r, r, c, o]`` from a folded gradient, and the memory for that."""
    padded, blocks, source = _filter_parts(dw, window, scratch)
    kernel = window.kernel[0]
    calls: list[Call] = [
        partial(np.copyto, blocks, source.reshape(blocks.shape)),
        partial(np.copyto, dw, padded[:kernel, :kernel]),
    ]
    return sequence(calls), source


def _filter_parts(w: np.ndarray, window: Window, scratch: Scratch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Memory for the filter with zeros added; the same as [r', r', s, s, c, o]; memory for the folded filter."""
    channels, outputs = w.shape[2:]
    taps, fold = folded(window).kernel[0], window.stride[0]
    padded = scratch.take((taps * fold, taps * fold, channels, outputs), w.dtype)
    blocks = padded.reshape(taps, fold, taps, fold, channels, outputs).transpose(0, 2, 1, 3, 4, 5)
    return padded, blocks, scratch.take((taps, taps, fold * fold * channels, outputs), w.dtype)
