"""Softmax over the last axis and its cross-entropy with integer labels, shifted by the largest logit so that nothing overflows."""

from __future__ import annotations

import numpy as np

from runtime.errors import GraphError
from runtime.kernels.parallel import Call


def compile_softmax(x: np.ndarray, y: np.ndarray) -> Call:
    """``y`` = exp(``x``) / sum over the last axis; may run in place."""
    column = np.empty((*x.shape[:-1], 1), x.dtype)

    def softmax() -> None:
        np.maximum.reduce(x, axis=-1, out=column, keepdims=True)
        np.subtract(x, column, out=y)
        np.exp(y, out=y)
        np.add.reduce(y, axis=-1, out=column, keepdims=True)
        np.divide(y, column, out=y)

    return softmax


def compile_softmax_gradient(y: np.ndarray, dy: np.ndarray, dx: np.ndarray, memory: np.ndarray) -> Call:
    """``dx`` = ``y`` (``dy`` - sum of ``y`` ``dy``); may run in place of ``dy``."""
    column = np.empty((*y.shape[:-1], 1), y.dtype)
    product = memory[: y.nbytes].view(y.dtype).reshape(y.shape)

    def gradient() -> None:
        np.multiply(y, dy, out=product)
        np.add.reduce(product, axis=-1, out=column, keepdims=True)
        np.subtract(dy, column, out=dx)
        np.multiply(dx, y, out=dx)

    return gradient


def _row_numbers(logits: np.ndarray) -> np.ndarray:
    return np.arange(logits.shape[0])


def _check_labels(labels: np.ndarray, classes: int, node: str) -> None:
    if labels.size and (np.minimum.reduce(labels) < 0 or np.maximum.reduce(labels) >= classes):
        wrong = labels[(labels < 0) | (labels >= classes)]
        raise GraphError(f"node {node}: label {wrong[0]} is not one of {classes} classes (0 to {classes - 1})")


def compile_cross_entropy(
    logits: np.ndarray, labels: np.ndarray, loss: np.ndarray, probabilities: np.ndarray, node: str
) -> Call:
    """``loss[b]`` = -log softmax(``logits[b]``)[``labels[b]``], and the softmax itself, which the gradient needs."""
    rows, classes = _row_numbers(logits), logits.shape[1]
    largest, total = np.empty((len(rows), 1), logits.dtype), np.empty((len(rows), 1), logits.dtype)
    flat_total = total.reshape(-1)

    def cross_entropy() -> None:
        _check_labels(labels, classes, node)
        np.maximum.reduce(logits, axis=1, out=largest, keepdims=True)
        np.subtract(logits, largest, out=probabilities)
        chosen = probabilities[rows, labels]
        np.exp(probabilities, out=probabilities)
        np.add.reduce(probabilities, axis=1, out=total, keepdims=True)
        np.divide(probabilities, total, out=probabilities)
        np.log(flat_total, out=loss)
        np.subtract(loss, chosen, out=loss)

    return cross_entropy


def compile_cross_entropy_gradient(
    probabilities: np.ndarray, labels: np.ndarray, dloss: np.ndarray, dlogits: np.ndarray
) -> Call:
    """``dlogits`` = (softmax - one at the label) ``dloss[b]``; may run in place of the probabilities."""
    rows, column = _row_numbers(probabilities), dloss[:, None]
    in_place = np.may_share_memory(probabilities, dlogits)

    def gradient() -> None:
        if not in_place:
            np.copyto(dlogits, probabilities)
        dlogits[rows, labels] -= 1
        np.multiply(dlogits, column, out=dlogits)

    return gradient


def compile_in_top_k(logits: np.ndarray, labels: np.ndarray, found: np.ndarray, k: int, node: str) -> Call:
    """``found[b]``: whether fewer than ``k`` logits of row b are larger than its label's. Never with a NaN, which all miss."""
    rows, classes = _row_numbers(logits), logits.shape[1]
    not_larger = np.empty(logits.shape, np.bool_)

    def in_top_k() -> None:
        _check_labels(labels, classes, node)
        np.less_equal(logits, logits[rows, labels][:, None], out=not_larger)
        np.greater(np.count_nonzero(not_larger, axis=1), classes - k, out=found)

    return in_top_k
