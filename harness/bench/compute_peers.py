"""AlexNet's training step in one process: ours beside PyTorch's and TensorFlow's, in images a second.

``python -m harness.bench.compute_peers`` starts one process a contender and lets them take turns, a step at a time, so that drift
of the machine hits them alike and nobody's idle threads stand in another's way. A ratio is the median of the rounds' own.
Every contender trains the 61,100,840-parameter single-tower form on one batch of random pixels: forward, backward, SGD.
Contenders that cannot be imported are left out with the reason. ``--peers`` names the interpreter that has them (``make peers``).
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

IMAGE = 227
RATE = 0.001
OWN = "verbflow"
# Filters (kernel, in, out, stride, padding, pooled) and dense layers (in, out) of the single-tower form.
FILTERS = (
    (11, 3, 64, 4, 0, True),
    (5, 64, 192, 1, 2, True),
    (3, 192, 384, 1, 1, False),
    (3, 384, 256, 1, 1, False),
    (3, 256, 256, 1, 1, True),
)
DENSE = ((9216, 4096), (4096, 4096), (4096, 1000))
# Settings that pin other kernels than the processor's best, or other numbers of threads than are asked for.
UNWANTED = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def _data(batch: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    return generator.random((batch, IMAGE, IMAGE, 3), np.float32), generator.integers(0, 1000, batch, np.int32)


def _own_step(batch: int, threads: int) -> Callable[[], float]:
    from runtime import Graph, Session
    from runtime.models import catalog
    from runtime.training.optimizers import SGD

    graph = Graph()
    with graph.as_default():
        model = catalog.build("alexnet_torchvision", batch, image=IMAGE)
        train = SGD(RATE).minimise(model.loss, model.parameters)
    images, labels = _data(batch)
    feeds = {model.inputs["images"]: images, model.inputs["labels"]: labels}
    session = Session(graph, threads=threads)
    return lambda: float(session.run([model.loss, train], feeds)[0])


def _torch_step(batch: int, threads: int, channels_last: bool) -> Callable[[], float]:
    import torch
    from torch import nn

    torch.set_num_threads(threads)
    layers: list[Any] = []
    for kernel, channels, filters, stride, padding, pooled in FILTERS:
        layers += [nn.Conv2d(channels, filters, kernel, stride, padding), nn.ReLU(inplace=True)]
        layers += [nn.MaxPool2d(3, 2)] if pooled else []
    layers.append(nn.Flatten())
    for inputs, units in DENSE:
        layers += [nn.Linear(inputs, units), nn.ReLU(inplace=True)]
    model = nn.Sequential(*layers[:-1])
    pixels, classes = _data(batch)
    images = torch.tensor(pixels).permute(0, 3, 1, 2).contiguous()
    labels = torch.tensor(classes.astype(np.int64))
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
        images = images.to(memory_format=torch.channels_last)
    optimizer, cross_entropy = torch.optim.SGD(model.parameters(), RATE), nn.CrossEntropyLoss()

    def step() -> float:
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return float(loss.item())

    return step


def _tensorflow_step(batch: int, threads: int) -> Callable[[], float]:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    generator = np.random.default_rng(0)

    def weights(*shape: int) -> Any:
        scale = (2 / np.prod(shape[:-1])) ** 0.5
        return tf.Variable((generator.standard_normal(shape) * scale).astype(np.float32))

    filters = [weights(kernel, kernel, channels, out) for kernel, channels, out, *_ in FILTERS]
    dense = [weights(inputs, units) for inputs, units in DENSE]
    biases = [tf.Variable(tf.zeros(value.shape[-1])) for value in (*filters, *dense)]
    variables = [*filters, *dense, *biases]
    pixels, classes = _data(batch)
    images, labels = tf.constant(pixels), tf.constant(classes)

    @tf.function
    def train() -> Any:
        with tf.GradientTape() as tape:
            x = images
            for (_, _, _, stride, padding, pooled), value, bias in zip(FILTERS, filters, biases):
                x = tf.nn.conv2d(x, value, stride, "SAME" if padding else "VALID")
                x = tf.nn.relu(tf.nn.bias_add(x, bias))
                x = tf.nn.max_pool2d(x, 3, 2, "VALID") if pooled else x
            x = tf.reshape(x, (batch, -1))
            for value, bias in zip(dense, biases[len(filters) :]):
                x = tf.nn.bias_add(tf.matmul(x, value), bias)
                x = tf.nn.relu(x) if value is not dense[-1] else x
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, x))
        for variable, gradient in zip(variables, tape.gradient(loss, variables)):
            variable.assign_sub(RATE * gradient)
        return loss

    return lambda: float(train())


CONTENDERS: dict[str, Callable[[int, int], Callable[[], float]]] = {
    OWN: _own_step,
    "torch channels_last": lambda batch, threads: _torch_step(batch, threads, True),
    "torch NCHW": lambda batch, threads: _torch_step(batch, threads, False),
    "tensorflow": _tensorflow_step,
}


def serve(name: str, batch: int, threads: int) -> None:
    """A contender's process: for each line on standard input one step, answered with its nanoseconds and its loss."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints must not be taken for an answer
    try:
        step = CONTENDERS[name](batch, threads)
    except ImportError as error:
        print(f"missing {error}", file=answers, flush=True)
        return
    step()
    print("ready", file=answers, flush=True)
    for _ in sys.stdin:
        begin, used = time.perf_counter_ns(), time.process_time_ns()
        loss = step()
        print(time.perf_counter_ns() - begin, time.process_time_ns() - used, loss, file=answers, flush=True)


class Contender:
    """The process of a contender. ``missing`` says why there is none. A context manager: the process ends with it."""

    def __init__(self, name: str, interpreter: str, batch: int, threads: int) -> None:
        environment = {key: value for key, value in os.environ.items() if key not in UNWANTED}
        blas_threads = 1 if name == OWN else threads
        environment |= {"OPENBLAS_NUM_THREADS": str(blas_threads), "OMP_NUM_THREADS": str(threads)}
        command = [interpreter, "-m", "harness.bench.compute_peers", "--serve", name]
        command += ["--batch", str(batch), "--threads", str(threads)]
        self.name = name
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
            cwd=Path(__file__).parents[2],
        )
        first = self._answer()
        self.missing = "" if first == "ready" else first.removeprefix("missing ") or "it ended before its first step"

    def __enter__(self) -> Contender:
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def step(self) -> tuple[int, int]:
        """Nanoseconds that one step took, and that it used of all processors together."""
        assert self._process.stdin is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        took, used, loss = self._answer().split()
        if not np.isfinite(float(loss)):
            raise RuntimeError(f"{self.name} no longer trains: its loss is {loss}")
        return int(took), int(used)

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@dataclass(frozen=True, slots=True)
class Comparison:
    """Nanoseconds of a step by contender, one a round, processor time likewise, and why others are missing."""

    batch: int
    rounds: Mapping[str, list[int]]
    used: Mapping[str, list[int]]
    missing: Mapping[str, str]

    def speed(self, contender: str, reference: str) -> float:
        """Median over rounds of how many times as fast ``contender`` is as ``reference``."""
        pairs = zip(self.rounds[contender], self.rounds[reference], strict=True)
        return statistics.median(other / own for own, other in pairs)

    def best_speed(self, contender: str, reference: str) -> float:
        """As ``speed``, for each one's fastest step: what is left of the ratio on a machine that others use too."""
        return min(self.rounds[reference]) / min(self.rounds[contender])


def compare(batch: int, threads: int, rounds: int, peers: str) -> Comparison:
    """Time all contenders in turns. The first step of each, which compiles, is not counted."""
    with ExitStack() as stack:
        found: list[Contender] = []
        missing: dict[str, str] = {}
        for name in CONTENDERS:
            interpreter = sys.executable if name == OWN else peers
            contender = stack.enter_context(Contender(name, interpreter, batch, threads))
            if contender.missing:
                missing[name] = contender.missing
            else:
                found.append(contender)
        times: dict[str, list[int]] = {contender.name: [] for contender in found}
        used: dict[str, list[int]] = {contender.name: [] for contender in found}
        for contender in found:
            contender.step()
        for _ in range(rounds):
            for contender in found:
                took, processors = contender.step()
                times[contender.name].append(took)
                used[contender.name].append(processors)
        return Comparison(batch, times, used, missing)


def lines(comparison: Comparison) -> list[str]:
    """A line a contender: median and fastest step, images a second, the least processor time of a step, and how fast we are beside
    it: by the median of the rounds' ratios, and by the fastest steps."""
    text = [f"AlexNet step, 61.1 M parameters, batch {comparison.batch}"]
    for name, times in comparison.rounds.items():
        median, fastest = statistics.median(times) / 1e9, min(times) / 1e9
        line = f"  {name:<20}{median:7.3f} s ({fastest:.3f} s at best) {comparison.batch / median:7.1f} images/s"
        line += f" {min(comparison.used[name]) / 1e9:6.2f} CPU s"
        if name != OWN and OWN in comparison.rounds:
            line += (
                f"  {OWN} has {comparison.speed(OWN, name):.2f}x its speed ({comparison.best_speed(OWN, name):.2f}x)"
            )
        text.append(line)
    text += [f"  {name:<20}left out: {reason}" for name, reason in comparison.missing.items()]
    return text


def main(arguments: Sequence[str] | None = None) -> None:
    beside = Path(".venv-peers/bin/python")
    parser = argparse.ArgumentParser(prog="python -m harness.bench.compute_peers", description=__doc__)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--peers", default=str(beside) if beside.exists() else sys.executable)
    parser.add_argument("--serve", choices=list(CONTENDERS), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.serve:
        serve(given.serve, given.batch, given.threads)
    else:
        print("\n".join(lines(compare(given.batch, given.threads, given.rounds, given.peers))))


if __name__ == "__main__":
    main()
