"""Kernels against plain loops in float64, over odd shapes, with one, two and three threads and memory full of rubbish."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from runtime.errors import ShapeError
from runtime.kernels import (
    blas,
    convolution,
    elementwise,
    matmul,
    normalization,
    parallel,
    pooling,
    toom_cook,
    winograd,
)
from runtime.kernels.scratch import Scratch
from runtime.kernels.toom_cook import Scheme
from runtime.kernels.window import Window, make_window

THREADS = (1, 2, 3)
# Images (batch, height, width, channels) and filters' outputs.
IMAGES = [((1, 7, 9, 3), 4), ((5, 12, 11, 2), 3)]
KERNELS = [(1, 1), (3, 3), (5, 2), (2, 3)]
STRIDES = [(1, 1), (2, 2), (3, 1)]


@pytest.fixture(autouse=True)
def helpers_end() -> Iterator[None]:
    yield
    parallel.close()


def rubbish(nbytes: int) -> np.ndarray:
    """Temporary memory whose content would show if it were read: NaN, whatever the width."""
    return np.full(nbytes, 0xFF, np.uint8)


def undefined(shape: tuple[int, ...], dtype: type = np.float64) -> np.ndarray:
    return np.full(shape, np.nan, dtype)


def patches(x: np.ndarray, window: Window, fill: float = 0.0) -> Iterator[tuple[tuple, tuple, np.ndarray]]:
    """(output position, input slices, patch) for every output position, images padded with ``fill``."""
    top, bottom, left, right = window.padding
    padded = np.pad(x, ((0, 0), (top, bottom), (left, right), (0, 0)), constant_values=fill)
    for i, j in itertools.product(range(window.out_height), range(window.out_width)):
        rows = slice(i * window.stride[0], i * window.stride[0] + window.kernel[0])
        columns = slice(j * window.stride[1], j * window.stride[1] + window.kernel[1])
        yield (slice(None), i, j), (slice(None), rows, columns), padded[:, rows, columns]


def unpadded(padded: np.ndarray, x: np.ndarray, window: Window) -> np.ndarray:
    top, _, left, _ = window.padding
    return padded[:, top : top + x.shape[1], left : left + x.shape[2]]


def padded_zeros(x: np.ndarray, window: Window) -> np.ndarray:
    top, bottom, left, right = window.padding
    return np.zeros((x.shape[0], x.shape[1] + top + bottom, x.shape[2] + left + right, x.shape[3]))


@pytest.mark.parametrize("piece_bytes", [1 << 20, 2000], ids=["whole-images", "some-rows"])
@pytest.mark.parametrize("padding", ["VALID", "SAME", (0, 2, 1, 0), (5, 5, 5, 5)], ids=str)
def test_convolution_and_its_gradients(padding, piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolution, "COLUMN_BYTES", piece_bytes)
    generator = np.random.default_rng(0)
    for (shape, outputs), kernel, stride in itertools.product(IMAGES, KERNELS, STRIDES):
        window = make_window(shape[1], shape[2], kernel, stride, padding)
        x, w = generator.normal(size=shape), generator.normal(size=(*kernel, shape[3], outputs))
        out = (shape[0], window.out_height, window.out_width, outputs)
        dy = generator.normal(size=out)
        y, dw, padded = np.zeros(out), np.zeros(w.shape), padded_zeros(x, window)
        for at, where, patch in patches(x, window):
            y[at] = np.tensordot(patch, w, 3)
            dw += np.tensordot(patch, dy[at], ([0], [0]))
            padded[where] += np.tensordot(dy[at], w, ([1], [3]))
        for threads in THREADS:
            got = undefined(out)
            memory = rubbish(convolution.forward_workspace(window, shape[0], shape[3], 8, threads))
            convolution.compile_forward(x, w.reshape(-1, outputs), got, window, threads, memory)()
            np.testing.assert_allclose(got, y, 1e-10, 1e-10)
            got = undefined(w.shape)
            memory = rubbish(convolution.filter_workspace(window, shape[0], shape[3], outputs, 8, threads))
            convolution.compile_filter_gradient(x, dy, got, window, threads, memory)()
            np.testing.assert_allclose(got, dw, 1e-10, 1e-10)
            got = undefined(shape)
            memory = rubbish(convolution.input_workspace(window, shape[0], shape[3], outputs, 8, threads))
            convolution.compile_input_gradient(w, dy, got, window, threads, memory)()
            np.testing.assert_allclose(got, unpadded(padded, x, window), 1e-10, 1e-10)


@pytest.mark.parametrize("size", toom_cook.SIZES)
def test_minimal_filtering_is_the_filter(size: int) -> None:
    generator = np.random.default_rng(size)
    for taps in range(2, size):
        scheme = Scheme(size - taps + 1, taps)
        data, filter_ = generator.normal(size=size), generator.normal(size=taps)
        bt, g, at = scheme.matrices(np.dtype(np.float64))
        np.testing.assert_allclose(at @ ((g @ filter_) * (bt @ data)), np.correlate(data, filter_), 1e-11, 1e-11)


@pytest.mark.parametrize("pieces", ["whole-images", "some-rows", "small-products"])
@pytest.mark.parametrize("padding", ["VALID", "SAME", (0, 2, 1, 0), (2, 2, 2, 2)], ids=str)
@pytest.mark.parametrize(
    ("scheme", "kernel", "stride"),
    [
        (Scheme(2, 3), 3, 1),
        (Scheme(3, 3), 3, 1),
        (Scheme(4, 3), 3, 1),
        (Scheme(5, 3), 3, 1),
        (Scheme(3, 5), 5, 1),
        (Scheme(3, 2), 3, 2),
        (Scheme(2, 3), 5, 2),
        (Scheme(3, 2), 5, 3),
    ],
    ids=str,
)
def test_winograds_convolution_is_the_direct_one(
    scheme: Scheme, kernel: int, stride: int, padding: Any, pieces: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    channels, outputs = 5, 4
    if pieces == "some-rows":
        monkeypatch.setattr(winograd, "PIECE_BYTES", 3000)
        monkeypatch.setattr(winograd, "FILTER_BYTES", 3000)
    if pieces == "small-products":
        channels, outputs = 29, 3
        monkeypatch.setattr(winograd, "_is_small", lambda *sizes: True)
        monkeypatch.setattr(winograd, "SMALL_PRODUCT", 400)
    generator = np.random.default_rng(2)
    for batch, height, width in ((1, 7, 9), (5, 12, 11), (3, 5, 6), (2, 5, 5), (0, 6, 6)):
        window = make_window(height, width, (kernel, kernel), (stride, stride), padding)
        x, w = (
            generator.normal(size=(batch, height, width, channels)),
            generator.normal(size=(kernel, kernel, channels, outputs)),
        )
        dy = generator.normal(size=(batch, window.out_height, window.out_width, outputs))
        y, dw, dx = undefined(dy.shape), undefined(w.shape), undefined(x.shape)
        sizes = (window, batch, channels)
        memory = rubbish(convolution.forward_workspace(*sizes, 8, 1))
        convolution.compile_forward(x, w.reshape(-1, outputs), y, window, 1, memory)()
        memory = rubbish(convolution.filter_workspace(*sizes, outputs, 8, 1))
        convolution.compile_filter_gradient(x, dy, dw, window, 1, memory)()
        memory = rubbish(convolution.input_workspace(*sizes, outputs, 8, 1))
        convolution.compile_input_gradient(w, dy, dx, window, 1, memory)()
        for threads in THREADS:
            got = undefined(y.shape)
            memory = rubbish(winograd.forward_workspace(scheme, *sizes, outputs, 8, threads))
            winograd.compile_forward(scheme, x, w, got, window, threads, memory)()
            np.testing.assert_allclose(got, y, 1e-10, 1e-10)
            got = undefined(w.shape)
            memory = rubbish(winograd.filter_workspace(scheme, *sizes, outputs, 8, threads))
            winograd.compile_filter_gradient(scheme, x, dy, got, window, threads, memory)()
            np.testing.assert_allclose(got, dw, 1e-10, 1e-10)
            if stride > 1:
                continue
            got = undefined(x.shape)
            memory = rubbish(winograd.input_workspace(scheme, *sizes, outputs, 8, threads))
            winograd.compile_input_gradient(scheme, w, dy, got, window, threads, memory)()
            np.testing.assert_allclose(got, dx, 1e-10, 1e-10)


def test_winograds_rounding_errors_stay_near_the_direct_sums() -> None:
    generator = np.random.default_rng(3)
    window = make_window(15, 15, (3, 3), (1, 1), "SAME")
    x = np.maximum(generator.normal(size=(2, 15, 15, 96)), 0).astype(np.float32)
    w = (generator.normal(size=(3, 3, 96, 32)) / 29).astype(np.float32)
    exact = undefined((2, 15, 15, 32))
    memory = rubbish(convolution.forward_workspace(window, 2, 96, 8, 1))
    convolution.compile_forward(x.astype(np.float64), w.reshape(-1, 32).astype(np.float64), exact, window, 1, memory)()

    def error(run: Callable[[np.ndarray], None]) -> float:
        got = undefined(exact.shape, np.float32)
        run(got)
        return float(np.sqrt(np.mean((got - exact) ** 2)))

    memory = rubbish(convolution.forward_workspace(window, 2, 96, 4, 1))
    direct = error(lambda got: convolution.compile_forward(x, w.reshape(-1, 32), got, window, 1, memory)())
    for size in toom_cook.SIZES:
        scheme = Scheme(size - 2, 3)
        room = rubbish(winograd.forward_workspace(scheme, window, 2, 96, 32, 4, 1))
        run = functools.partial(winograd.compile_forward, scheme, x, w)
        assert error(lambda got, run=run, room=room: run(got, window, 1, room)()) < 16 * direct


def test_winograds_scheme_is_taken_where_it_pays() -> None:
    for size, kernel, stride, padding, channels, scheme in (
        (13, 3, 1, "SAME", 256, Scheme(5, 3)),
        (56, 3, 1, "SAME", 256, Scheme(4, 3)),
        (27, 5, 1, "SAME", 64, Scheme(3, 5)),
        (13, 3, 1, "SAME", 4, None),
        (13, 3, 2, "SAME", 256, None),
        (13, 1, 1, "SAME", 256, None),
        (13, 11, 1, "SAME", 256, None),
        (30, 9, 3, "SAME", 64, Scheme(5, 3)),
        (3, 3, 1, "VALID", 256, None),  # one output of a tile's four
        (13, 3, 1, (3, 3, 3, 3), 256, None),
    ):
        window = make_window(size, size, (kernel, kernel), (stride, stride), padding)
        assert winograd.chosen(window, 32, channels, channels, 4) == scheme
        turned = winograd.chosen_turned(window, 32, channels, channels, 4)
        assert (turned is None) == (scheme is None or stride > 1)
    window = make_window(13, 13, (3, 3), (1, 1), "SAME")
    assert winograd.chosen(window, 32, 256, 256, 2) is None  # half precision
    assert winograd.chosen(window, 32, 256, 0, 4) is winograd.chosen(window, 0, 256, 256, 4) is None
    assert winograd.chosen(window, 1, 1024, 1024, 4) is None  # the filter's transform costs more than one image saves


@pytest.mark.parametrize("piece_bytes", [1 << 19, 300], ids=["whole-images", "some-rows"])
@pytest.mark.parametrize("padding", ["VALID", "SAME", (0, 1, 1, 0)], ids=str)
def test_pooling_and_its_gradients(padding, piece_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pooling, "PIECE_BYTES", piece_bytes)
    generator = np.random.default_rng(1)
    for (shape, _), kernel, stride in itertools.product(IMAGES, KERNELS[1:], STRIDES):
        window = make_window(shape[1], shape[2], kernel, stride, padding)
        x = generator.normal(size=shape)
        out = (shape[0], window.out_height, window.out_width, shape[3])
        dy = generator.normal(size=out)
        largest, mean = np.zeros(out), np.zeros(out)
        by_largest, by_mean = padded_zeros(x, window), padded_zeros(x, window)
        for at, where, patch in patches(x, window, np.nan):
            inside = np.isfinite(patch)
            largest[at], mean[at] = np.nanmax(patch, (1, 2)), np.nanmean(patch, (1, 2))
            by_largest[where] += (patch == largest[at][:, None, None]) * dy[at][:, None, None]
            by_mean[where] += inside / inside.sum((1, 2), keepdims=True) * dy[at][:, None, None]
        sizes = (window, shape[0], shape[3], 8)
        for threads in THREADS:
            y, dx = undefined(out), undefined(shape)
            pooling.compile_max(x, y, window, threads, rubbish(pooling.forward_workspace(*sizes, threads)))()
            np.testing.assert_array_equal(y, largest)
            memory = rubbish(pooling.max_gradient_workspace(*sizes, threads))
            pooling.compile_max_gradient(x, y, dy, dx, window, threads, memory)()
            np.testing.assert_allclose(dx, unpadded(by_largest, x, window), 1e-12, 1e-12)
            pooling.compile_average(x, y, window, threads, rubbish(pooling.forward_workspace(*sizes, threads)))()
            np.testing.assert_allclose(y, mean, 1e-12, 1e-12)
            memory = rubbish(pooling.average_gradient_workspace(*sizes, threads))
            pooling.compile_average_gradient(dy, dx, window, threads, memory)()
            np.testing.assert_allclose(dx, unpadded(by_mean, x, window), 1e-12, 1e-12)


def test_a_window_of_equal_numbers_gives_its_gradient_once() -> None:
    window = make_window(6, 6, (3, 3), (2, 2), "VALID")
    x, y, dx = np.zeros((1, 6, 6, 1)), np.zeros((1, 2, 2, 1)), undefined((1, 6, 6, 1))
    dy = np.arange(1.0, 5.0).reshape(y.shape)
    memory = rubbish(pooling.max_gradient_workspace(window, 1, 1, 8, 1))
    pooling.compile_max_gradient(x, y, dy, dx, window, 1, memory)()
    assert sorted(dx[dx != 0]) == [1, 2, 3, 4]


def test_a_window_says_what_is_wrong_with_it() -> None:
    with pytest.raises(ShapeError, match=r"window of \(5, 5\) is larger than the image of 3 x 4"):
        make_window(3, 4, (5, 5), (1, 1), "VALID")
    with pytest.raises(ShapeError, match="must be positive"):
        make_window(3, 4, (2, 2), (0, 1), "VALID")
    with pytest.raises(ShapeError, match="'REFLECT' is not VALID, SAME"):
        make_window(3, 4, (2, 2), (1, 1), "REFLECT")


@pytest.mark.parametrize("batch", [1, 5, 24, 33, 70])
@pytest.mark.parametrize("threads", THREADS)
def test_matrix_products_of_every_kind(batch: int, threads: int) -> None:
    """Sizes that take each of the ways there are, with rests that fit no block."""
    generator = np.random.default_rng(batch)
    inputs, outputs = 1100, 1003
    x, w = generator.normal(size=(batch, inputs)), generator.normal(size=(inputs, outputs))
    dy = generator.normal(size=(batch, outputs))
    x32, w32, dy32 = (array.astype(np.float32) for array in (x, w, dy))
    for a, b, exact in ((x32, w32, x @ w), (x32.T, dy32, x.T @ dy), (dy32, w32.T, dy @ w.T), (w32.T, x32.T, w.T @ x.T)):
        got = undefined(exact.shape, np.float32)
        memory = rubbish(matmul.matmul_workspace(len(a), 4, threads))
        matmul.compile_matmul(a, b, got, threads, memory)()
        np.testing.assert_allclose(got, exact, 1e-3, 1e-3)


@pytest.mark.parametrize("core", ["SkylakeX", "Haswell"])
def test_products_do_not_depend_on_the_processor(core: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas, "core", lambda: core)
    generator = np.random.default_rng(0)
    x = generator.normal(size=(24, 1100)).astype(np.float32)
    dy = generator.normal(size=(24, 1003)).astype(np.float32)
    w = generator.normal(size=(1100, 1003)).astype(np.float32)
    for a, b in ((x.T, dy), (dy, w.T)):
        got = undefined((len(a), b.shape[1]), np.float32)
        matmul.compile_matmul(a, b, got, 2, rubbish(matmul.matmul_workspace(len(a), 4, 2)))()
        np.testing.assert_allclose(got, a.astype(np.float64) @ b, 1e-3, 1e-3)


def test_products_without_terms_or_elements_are_zeros() -> None:
    out = undefined((3, 2))
    matmul.compile_matmul(np.empty((3, 0)), np.empty((0, 2)), out)()
    assert not out.any()
    matmul.compile_matmul(np.empty((0, 4)), np.empty((4, 2)), np.empty((0, 2)))()


@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("shape", [(7, 3), (2, 331, 96), (600_001, 1), (0, 5)], ids=str)
def test_bias_and_relu_and_their_gradients(shape: tuple[int, ...], threads: int) -> None:
    generator = np.random.default_rng(3)
    x = generator.normal(size=shape).astype(np.float32)
    bias, dy = generator.normal(size=shape[-1]).astype(np.float32), generator.normal(size=shape).astype(np.float32)
    y = undefined(shape, np.float32)
    rows = x.size // shape[-1]
    for relu in (False, True):
        memory = rubbish(elementwise.bias_workspace(rows, shape[-1], 4))
        elementwise.compile_bias(x, bias, y, threads, memory, relu)()
        np.testing.assert_array_equal(y, np.maximum(x + bias, 0) if relu else x + bias)
    expected = np.where(y > 0, dy, 0)
    for target in (undefined(shape, np.float32), dy.copy(), y.copy()):
        gradient = target if np.array_equal(target, dy) else dy
        value = target if np.array_equal(target, y) else y
        memory = rubbish(elementwise.relu_gradient_workspace(4, threads))
        elementwise.compile_relu_gradient(value, gradient, target, threads, memory)()
        np.testing.assert_array_equal(target, expected)
    total = undefined(shape[-1:], np.float32)
    memory = rubbish(elementwise.column_sum_workspace(shape[-1], 4, threads))
    elementwise.compile_column_sum(dy.reshape(rows, shape[-1]), total, threads, memory)()
    exact = dy.reshape(rows, shape[-1]).sum(0, dtype=np.float64)
    np.testing.assert_allclose(total, exact, 1e-4, 1e-3 * max(1, rows) ** 0.5)


def test_batch_statistics_of_numbers_far_from_zero() -> None:
    """Centring before squaring keeps the variance right where mean^2 is a million times larger."""
    x = (1000 + np.random.default_rng(4).normal(size=(5000, 40))).astype(np.float32)
    mean, variance = undefined((40,), np.float32), undefined((40,), np.float32)
    memory = rubbish(normalization.batch_workspace(5000, 40, 4))
    normalization.compile_batch_statistics(x, mean, variance, memory)()
    np.testing.assert_allclose(mean, x.mean(0, dtype=np.float64), 1e-6)
    np.testing.assert_allclose(variance, x.var(0, dtype=np.float64), 1e-3)


def test_results_are_the_same_every_time_and_nearly_so_for_other_numbers_of_threads() -> None:
    generator = np.random.default_rng(5)
    x = generator.normal(size=(6, 13, 13, 8)).astype(np.float32)
    dy = generator.normal(size=(6, 13, 13, 16)).astype(np.float32)
    window = make_window(13, 13, (3, 3), (1, 1), "SAME")
    results = []
    for threads in (1, 2, 2, 2):
        dw = undefined((3, 3, 8, 16), np.float32)
        memory = rubbish(convolution.filter_workspace(window, 6, 8, 16, 4, threads))
        call = convolution.compile_filter_gradient(x, dy, dw, window, threads, memory)
        for _ in range(3):
            call()
            results.append(dw.copy())
    for one in results[3:]:
        np.testing.assert_array_equal(one, results[3])
    np.testing.assert_allclose(results[0], results[3], 1e-4, 1e-4)


def test_work_is_shared_and_the_results_are_complete_when_a_call_returns() -> None:
    threads, out = set(), np.zeros(1000)
    meet = threading.Barrier(2, timeout=20)

    def item(index: int, thread: int) -> Callable[[], None]:
        def run() -> None:
            if index < 2:
                meet.wait()  # neither of the first two items ends before the other has begun
            threads.add(threading.current_thread().name)
            out[index] += index + 1

        return run

    call = parallel.free_shares([[item(index, thread) for thread in range(2)] for index in range(1000)])
    call()
    np.testing.assert_array_equal(out, np.arange(1, 1001))
    assert len(threads) == 2


def test_an_error_of_a_helper_is_raised_after_all_have_ended() -> None:
    ended = []

    def fails() -> None:
        raise ShapeError("on purpose")

    call = parallel.fixed_shares([[lambda: ended.append(0)], [fails], [lambda: ended.append(2)]])
    for _ in range(3):
        ended.clear()
        with pytest.raises(ShapeError, match="on purpose"):
            call()
        assert sorted(ended) == [0, 2]


def test_kernels_on_two_threads_at_once_do_not_wait_for_each_other() -> None:
    inside, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        inside.set()
        assert go_on.wait(20)

    first = threading.Thread(target=parallel.fixed_shares([[hold], [lambda: None]]))
    first.start()
    assert inside.wait(20)
    done: list[int] = []
    parallel.fixed_shares([[lambda: done.append(1)], [lambda: done.append(2)]])()  # the helpers are busy
    assert done == [1, 2]
    go_on.set()
    first.join(20)


def test_idle_helpers_end_and_new_ones_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "IDLE_SECONDS", 0.01)
    call = parallel.fixed_shares([[lambda: None]] * 3)
    for _ in range(3):
        call()
        helpers = [thread for thread in threading.enumerate() if thread.name.startswith(parallel.THREAD_NAME)]
        for thread in helpers:
            thread.join(20)
            assert not thread.is_alive()


def test_shares_of_nothing() -> None:
    parallel.fixed_shares([[], []])()
    parallel.free_shares([])()
    assert parallel.split(3, 5) == [(0, 1), (1, 2), (2, 3)]
    assert parallel.split(7, 2) == [(0, 3), (3, 7)]


def test_blas_threads_can_be_set_where_the_library_is_known() -> None:
    if blas.threads() is None:
        pytest.skip("this numpy's BLAS does not say how many threads it takes")
    before = blas.threads()
    with blas.limited(1):
        assert blas.threads() == 1
        assert blas.set_threads(2).startswith("2 by ")
    assert blas.threads() == before
    assert set(blas.environment(1).values()) == {"1"}


def test_scratch_is_aligned_and_apart() -> None:
    scratch = Scratch(np.zeros(256, np.uint8))
    first, second = scratch.take((3,), np.dtype(np.float32)), scratch.take((2, 2), np.dtype(np.float64))
    first.fill(1)
    second.fill(2)
    assert second.ctypes.data - first.ctypes.data == 64
    assert first.sum() == 3 and scratch.rest().size == 128
