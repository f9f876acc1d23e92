"""Our gRPC transports against gRPC written as a bare loop, side by side: python -m harness.bench.grpc_peers.

Two pairs of real processes, one with the tuned allocator and one with the C library's defaults, take turns; within a round
the variants alternate fetch by fetch, so drift hits all alike. ``bare`` is the best that gRPC in Python was found to do with
one fetch at a time (a bidirectional stream, 2 MiB chunks, tuned allocator, a thread for nothing but this stream);
``unary`` is the first thing one writes. Every variant ends with the bytes in a given numpy array.
"""

from __future__ import annotations

import argparse
import queue
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from functools import partial

import grpc
import numpy as np

from runtime.deadline import Deadline
from runtime.tensor import TensorSpec
from runtime.testing import Rank, open_end, pattern_tensor, spawn
from runtime.transport.base import Channel
from runtime.transport.grpc import allocator

CHUNK = 2 << 20
SIZES = [8, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20]
_UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
Fetch = Callable[[int, np.ndarray], None]


def bare_server(content: np.ndarray) -> tuple[grpc.Server, str]:
    """The peers: ``Stream`` answers a size by chunks, ``Unary`` by one message."""
    view = content.data

    def stream(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        for request in requests:
            nbytes = int(request)
            for begin in range(0, nbytes, CHUNK):
                yield bytes(view[begin : min(begin + CHUNK, nbytes)])

    def unary(request: bytes, context: grpc.ServicerContext) -> bytes:
        return content[: int(request)].tobytes()

    server = grpc.server(futures.ThreadPoolExecutor(4), options=_UNLIMITED)
    handlers = {
        "Stream": grpc.stream_stream_rpc_method_handler(stream),
        "Unary": grpc.unary_unary_rpc_method_handler(unary),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    return server, f"127.0.0.1:{port}"


class BareStream:
    """The bare loop; one fetch at a time, no keys, no errors, no deadline."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._answers = channel.stream_stream("/bare/Stream")(iter(self._requests.get, None))

    def fetch(self, nbytes: int, into: np.ndarray) -> None:
        self._requests.put(b"%d" % nbytes)
        at = 0
        while at < nbytes:
            message = next(self._answers)
            into[at : at + len(message)] = np.frombuffer(message, np.uint8)
            at += len(message)

    def close(self) -> None:
        self._requests.put(None)
        self._answers.cancel()


def measure(rank: Rank, sizes: list[int], rounds: int, seconds: float) -> dict[str, dict[int, list[float]]]:
    """Rank 0 and 1: ours and the bare loop, tuned. Rank 2 and 3: unary, default allocator. Even ranks measure and return,
    by variant and size, the median seconds of each round."""
    tuned = rank.rank < 2
    if tuned:
        allocator.tune()
    if rank.rank % 2:
        _serve(rank, sizes, rounds, tuned)
        return {}
    addresses = rank.exchange()[rank.rank + 1]
    into = np.ones(sizes[-1], np.uint8)
    bare = grpc.insecure_channel(addresses["bare"], _UNLIMITED)
    ends = {name: open_end(name, arena_bytes=1 << 16) for name in ("grpc", "grpc_proto")} if tuned else {}
    variants: dict[str, Fetch] = {}
    if tuned:
        stream = BareStream(bare)
        variants["bare"] = stream.fetch
        for name, end in ends.items():
            channel = end.transport.connect(addresses[name], peer="the server", deadline=rank.deadline)
            end.channels[1] = channel
            variants[name] = partial(_fetch, channel)
    else:
        call = bare.unary_unary("/bare/Unary")

        def unary(nbytes: int, into: np.ndarray) -> None:
            into[:nbytes] = np.frombuffer(call(b"%d" % nbytes), np.uint8)

        variants["unary"] = unary
    results: dict[str, dict[int, list[float]]] = {name: {size: [] for size in sizes} for name in variants}
    for size in sizes:
        for _ in range(rounds):
            for turn in (0, 2):
                rank.barrier()
                if turn == rank.rank:
                    for name, samples in _round(variants, size, into, seconds).items():
                        results[name][size].append(statistics.median(samples))
    if tuned:
        stream.close()
    for end in ends.values():
        end.close()
    bare.close()
    rank.barrier()
    return results


def _fetch(channel: Channel, nbytes: int, into: np.ndarray) -> None:
    deadline = Deadline.after(60)
    channel.fetch(str(nbytes), into[:nbytes], deadline=deadline).result(deadline)


def _serve(rank: Rank, sizes: list[int], rounds: int, tuned: bool) -> None:
    content = pattern_tensor(TensorSpec((sizes[-1],), np.dtype(np.uint8)))
    server, address = bare_server(content)
    addresses: dict[str, object] = {"bare": address}
    ends = [open_end(name, arena_bytes=1 << 16) for name in ("grpc", "grpc_proto")] if tuned else []
    for end in ends:
        for size in sizes:
            end.source.put(str(size), content[:size])
        addresses[end.transport.name] = end.listen()
    rank.exchange(addresses)
    for _ in range(2 * rounds * len(sizes) + 1):
        rank.barrier()
    for end in ends:
        end.close()
    server.stop(None).wait()


def _round(variants: dict[str, Fetch], size: int, into: np.ndarray, seconds: float) -> dict[str, list[float]]:
    """Alternate until every variant had its time and at least three fetches; the first of each does not count."""
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for fetch in variants.values():
        fetch(size, into)
    end = time.perf_counter() + seconds * len(variants)
    while time.perf_counter() < end or min(map(len, samples.values())) < 3:
        for name, fetch in variants.items():
            begin = time.perf_counter()
            fetch(size, into)
            samples[name].append(time.perf_counter() - begin)
    return samples


def compare(sizes: list[int], rounds: int, seconds: float) -> dict[str, dict[int, list[float]]]:
    """Run it: variant -> size in bytes -> seconds, the median of each round."""
    from harness.bench import grpc_peers  # by this name in the ranks too, also when this module is __main__

    limit = 60 + 4 * len(sizes) * rounds * (4 * seconds + 6)
    return {
        name: rows
        for part in spawn(4, grpc_peers.measure, sizes, rounds, seconds, timeout=limit)
        for name, rows in part.items()
    }


def table(results: dict[str, dict[int, list[float]]]) -> str:
    """Medians over the rounds, and the speed of every variant as a multiple of the bare loop's (paired by round)."""
    lines = []
    others = [name for name in results if name != "bare"]
    lines.append(f"{'bytes':>10}" + "".join(f"{name + ' us':>15}" for name in results) + f"{'bare GB/s':>11}")
    lines[0] += "".join(f"{name + '/bare':>17}" for name in others)
    for size, bare in results["bare"].items():
        medians = [statistics.median(rows[size]) for rows in results.values()]
        line = f"{size:>10}" + "".join(f"{median * 1e6:>15.1f}" for median in medians)
        line += f"{size / statistics.median(bare) / 1e9:>11.2f}"
        for name in others:
            ratio = statistics.median(b / other for b, other in zip(bare, results[name][size], strict=True))
            line += f"{ratio:>17.2f}"
        lines.append(line)
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.5, help="of fetching a variant, size and round")
    options = parser.parse_args()
    print(table(compare(sorted(options.sizes), options.rounds, options.seconds)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
