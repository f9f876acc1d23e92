"""The elementwise part of an LSTM cell: gates in the order input, forget, candidate, output (as PyTorch's)."""

from __future__ import annotations

import numpy as np

from runtime.kernels.parallel import Call


def _sigmoid(x: np.ndarray, out: np.ndarray) -> None:
    """By way of tanh, which cannot overflow."""
    np.multiply(x, 0.5, out=out)
    np.tanh(out, out=out)
    np.multiply(out, 0.5, out=out)
    np.add(out, 0.5, out=out)


def _gates(array: np.ndarray) -> tuple[np.ndarray, ...]:
    size = array.shape[1] // 4
    return tuple(array[:, at * size : (at + 1) * size] for at in range(4))


def compile_lstm(
    preactivations: np.ndarray,
    before: np.ndarray,
    hidden: np.ndarray,
    cell: np.ndarray,
    gates: np.ndarray,
    memory: np.ndarray,
) -> Call:
    """``gates[b, 4 h]`` = the activated ``preactivations``; ``cell`` = forget * ``before`` + input * candidate; ``hidden`` =
    output * tanh(``cell``)."""
    size = cell.shape[1]
    inward, forget, candidate, outward = _gates(gates)
    sources = _gates(preactivations)
    product = memory[: cell.nbytes].view(cell.dtype).reshape(cell.shape)
    first, last = slice(0, 2 * size), slice(3 * size, 4 * size)

    def lstm() -> None:
        _sigmoid(preactivations[:, first], gates[:, first])
        np.tanh(sources[2], out=candidate)
        _sigmoid(preactivations[:, last], gates[:, last])
        np.multiply(inward, candidate, out=product)
        np.multiply(forget, before, out=cell)
        np.add(cell, product, out=cell)
        np.tanh(cell, out=hidden)
        np.multiply(hidden, outward, out=hidden)

    return lstm


def compile_lstm_gradient(
    gates: np.ndarray,
    before: np.ndarray,
    cell: np.ndarray,
    dhidden: np.ndarray | None,
    dcell: np.ndarray | None,
    dpreactivations: np.ndarray,
    dbefore: np.ndarray,
    memory: np.ndarray,
) -> Call:
    """Gradients of ``compile_lstm``; an absent ``dhidden`` or ``dcell`` counts as zero."""
    inward, forget, candidate, outward = _gates(gates)
    din, dforget, dcandidate, dout = _gates(dpreactivations)
    flat = memory[: 2 * cell.nbytes].view(cell.dtype).reshape(2, *cell.shape)
    squashed, total = flat

    def slope(gate: np.ndarray, gradient: np.ndarray) -> None:
        """``gradient`` * gate * (1 - gate), in place."""
        np.multiply(gradient, gate, out=gradient)
        np.multiply(gradient, gate, out=squashed)
        np.subtract(gradient, squashed, out=gradient)

    def gradient() -> None:
        if dhidden is None:
            dout.fill(0)
            total.fill(0)
        else:
            np.tanh(cell, out=squashed)
            np.multiply(dhidden, squashed, out=dout)
            np.multiply(squashed, squashed, out=squashed)
            np.subtract(1, squashed, out=squashed)
            np.multiply(dhidden, outward, out=total)
            np.multiply(total, squashed, out=total)
        if dcell is not None:
            np.add(total, dcell, out=total)
        np.multiply(total, candidate, out=din)
        np.multiply(total, before, out=dforget)
        np.multiply(total, inward, out=dcandidate)
        np.multiply(candidate, candidate, out=squashed)
        np.multiply(dcandidate, squashed, out=squashed)
        np.subtract(dcandidate, squashed, out=dcandidate)
        slope(inward, din)
        slope(forget, dforget)
        slope(outward, dout)
        np.multiply(total, forget, out=dbefore)

    return gradient
