"""Data to train on: random pixels, as Jia et al. (2018) used, and the handwritten digits that scikit-learn carries."""

from __future__ import annotations

import gzip
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from runtime.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Dataset:
    """``images`` float32 [n, height, width, channels] and integer ``labels`` [n], split into training and test parts."""

    images: np.ndarray
    labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def random_images(
    batch: int, image: int, channels: int = 3, classes: int = 1000, seed: int = 0
) -> dict[str, np.ndarray]:
    """One batch of uniform pixels in [0, 1) and uniform labels, to feed by name. The same for the same seed."""
    generator = np.random.Generator(np.random.Philox(seed))
    return {
        "images": generator.random((batch, image, image, channels), np.float32),
        "labels": generator.integers(0, classes, batch, np.int32),
    }


def digits(test_fraction: float = 0.2, seed: int = 0) -> Dataset:
    """1797 images of 8 x 8 pixels in [0, 1], ten classes, shuffled by ``seed`` and split; ConfigError without scikit-learn."""
    if not 0 < test_fraction < 1:
        raise ConfigError(f"test_fraction {test_fraction} is not between 0 and 1")
    table = _digits_table()
    pixels, labels = table[:, :-1], table[:, -1]
    order = np.random.Generator(np.random.Philox(seed)).permutation(len(labels))
    images = np.ascontiguousarray((pixels[order] / 16).astype(np.float32).reshape(-1, 8, 8, 1))
    labels = np.ascontiguousarray(labels[order].astype(np.int32))
    test = round(len(labels) * test_fraction)
    return Dataset(images[test:], labels[test:], images[:test], labels[:test])


def _digits_table() -> np.ndarray:
    # Read from scikit-learn's own file: importing it takes seconds, most of them for scipy, in every worker.
    spec = importlib.util.find_spec("sklearn")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("the digits come with scikit-learn, which is not installed")
    path = Path(spec.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
    try:
        with gzip.open(path, "rt", encoding="ascii") as file:
            return np.loadtxt(file, delimiter=",")
    except OSError as error:
        raise ConfigError(f"scikit-learn has no digits at {path}: {error}") from error


def batches(
    dataset: Dataset, batch: int, *, worker: int = 0, workers: int = 1, seed: int = 0
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Training batches for ever, each epoch in a new order that follows from ``seed``; what is left over is dropped.

    All workers see the same order, and worker i of n takes batches i, i + n, ...: n workers together do exactly what one does
    with a batch n times as large.
    """
    count = len(dataset.labels)
    if batch < 1 or workers * batch > count or not 0 <= worker < workers:
        raise ConfigError(
            f"{workers} workers (this one is {worker}) cannot take batches of {batch} from {count} examples"
        )
    epoch = 0
    while True:
        order = np.random.Generator(np.random.Philox([seed, epoch])).permutation(count)
        for first in range(0, count - workers * batch + 1, workers * batch):
            chosen = order[first + worker * batch : first + (worker + 1) * batch]
            yield dataset.images[chosen], dataset.labels[chosen]
        epoch += 1
