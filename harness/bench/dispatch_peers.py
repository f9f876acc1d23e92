"""What an op costs beside its arithmetic: our executor against a bare numpy loop, and a session's run against TensorFlow's.

``python -m harness.bench.dispatch_peers`` prints both side by side from one process. Rounds of all contenders take turns, so that
drift of the machine hits them alike; a ratio is the median of the rounds' own. Where TensorFlow cannot be imported its
columns are left out.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from runtime import Graph, Session
from runtime.graph import array_ops as ops

CHAIN = 1000
ROUNDS = 15
ROUND_NS = 40_000_000


@dataclass(frozen=True, slots=True)
class Comparison:
    """Nanoseconds of one run by contender, one a round (the round's fastest), in the order in which they took turns."""

    name: str
    rounds: Mapping[str, list[int]]

    def median(self, contender: str) -> float:
        return statistics.median(self.rounds[contender])

    def ratio(self, contender: str, reference: str) -> float:
        """Median over rounds of the contender's time divided by the reference's: below 1 is faster than it."""
        pairs = zip(self.rounds[contender], self.rounds[reference], strict=True)
        return statistics.median(own / other for own, other in pairs)


def compare(name: str, contenders: Mapping[str, Callable[[], object]], rounds: int = ROUNDS) -> Comparison:
    """Time the contenders in turns; each is called once before, to compile and to warm up."""
    for call in contenders.values():
        call()
    times: dict[str, list[int]] = {contender: [] for contender in contenders}
    for _ in range(rounds):
        for contender, call in contenders.items():
            times[contender].append(_fastest(call))
    return Comparison(name, times)


def _fastest(call: Callable[[], object]) -> int:
    clock, best, end = time.perf_counter_ns, 1 << 62, time.perf_counter_ns() + ROUND_NS
    while True:
        start = clock()
        call()
        now = clock()
        best = min(best, now - start)
        if now > end:
            return best


def compare_chain(length: int = CHAIN, rounds: int = ROUNDS) -> Comparison:
    """``length`` adds of 8 floats, each of the one before: ours, TensorFlow's graph, and np.add(out=) in a loop."""
    feed = np.ones(8, np.float32)
    graph = Graph()
    with graph.as_default():
        x = ops.placeholder((8,), np.float32, name="x")
        y = x
        for _ in range(length):
            y = ops.add(y, x)
    total, step = np.ones(8, np.float32), np.ones(8, np.float32)

    def bare() -> None:
        add = np.add
        for _ in range(length):
            add(total, step, out=total)

    with Session(graph) as session:
        expected = np.full(8, length + 1, np.float32)
        assert np.array_equal(session.run(y, {x: feed}), expected)
        contenders = {"bare": bare, "verbflow": lambda: session.run(y, {x: feed})}
        foreign = _tensorflow_chain(length, feed)
        if foreign is not None:
            contenders["tensorflow"] = foreign
        return compare(f"chain of {length} adds", contenders, rounds)


def compare_run(rounds: int = ROUNDS) -> Comparison:
    """One run of one op with one feed: what a session costs."""
    feed = np.ones(8, np.float32)
    graph = Graph()
    with graph.as_default():
        x = ops.placeholder((8,), np.float32, name="x")
        y = ops.add(x, x)
    with Session(graph) as session:
        contenders: dict[str, Callable[[], object]] = {"verbflow": lambda: session.run(y, {x: feed})}
        foreign = _tensorflow_chain(1, feed)
        if foreign is not None:
            contenders["tensorflow"] = foreign
        return compare("session run of one op", contenders, rounds)


def _tensorflow_chain(length: int, feed: np.ndarray) -> Callable[[], object] | None:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        import tensorflow.compat.v1 as tf
    except ImportError:
        return None
    graph = tf.Graph()
    with graph.as_default():
        x = tf.placeholder(tf.float32, (8,))
        y = x
        for _ in range(length):
            y = tf.add(y, x)
    # Without Grappler, which would rewrite the chain into one node.
    config = tf.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    session = tf.Session(graph=graph, config=config)
    return lambda: session.run(y, {x: feed})


def lines(comparison: Comparison, ops_a_run: int = 1) -> list[str]:
    """One line a contender: microseconds a run, nanoseconds an op, ratio to the others."""
    names = list(comparison.rounds)
    text = [comparison.name]
    for name in names:
        run = comparison.median(name)
        ratios = ", ".join(f"{comparison.ratio(name, other):.2f}x {other}" for other in names if other != name)
        text.append(f"  {name:<11}{run / 1e3:10.1f} us  {run / ops_a_run:8.0f} ns an op  {ratios}")
    return text


def main() -> None:
    print("\n".join([*lines(compare_chain(), CHAIN), *lines(compare_run())]))


if __name__ == "__main__":
    main()
