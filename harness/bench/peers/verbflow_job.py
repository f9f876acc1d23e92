"""``python -m harness.bench.peers.verbflow_job``: a worker of our own job in ``cluster_peers``, as ``tensorflow_job``."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from runtime.cluster.options import add_arguments, log_to_stderr, open_server, read_token, set_threads

if TYPE_CHECKING:
    from runtime.cluster.server import Server
    from runtime.cluster.session import Session
    from runtime.graph.graph import Graph


def op_step(graph: Graph, server: Server, batch: int) -> Callable[[Session], object]:
    from runtime.graph.math_ops import add
    from runtime.graph.state_ops import variable

    with graph.device("/job:ps/task:0"):
        value = variable("value", (4,))
        doubled = add(value, value)
    return lambda session: session.run(doubled)


def alexnet_step(graph: Graph, server: Server, batch: int) -> Callable[[Session], object]:
    import numpy as np

    from runtime.models import catalog
    from runtime.training.optimizers import SGD
    from runtime.training.schemes import asynchronous

    # Without a parameter server every worker trains alone, with the variables in its own process.
    home = "/job:ps/task:0" if "/job:ps/task:0" in server.cluster else server.name
    with graph.device(server.name), graph.variable_devices(lambda spec: home):
        model = catalog.build("alexnet_torchvision", batch)
        scheme = asynchronous(model.loss, SGD(0.001), model.parameters)
    random = np.random.default_rng(0)
    pixels = model.inputs["images"]
    feeds = {
        pixels: random.random(pixels.shape, np.float32),
        model.labels: random.integers(0, 1000, batch).astype(model.labels.dtype),
    }
    return lambda session: session.run([model.loss, scheme.train], feeds)


def main() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    parser.add_argument("--what", choices=("op", "alexnet"), required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    arguments = parser.parse_args()
    log_to_stderr(arguments.log_level)
    set_threads(arguments.blas_threads)
    token = read_token(arguments.token_fd)
    from runtime.cluster.session import Session
    from runtime.graph.graph import Graph

    graph = Graph()
    with open_server(arguments, token) as server, graph.as_default():
        step = {"op": op_step, "alexnet": alexnet_step}[arguments.what](graph, server, arguments.batch)
        with Session(graph, server) as session:
            for _ in range(3):
                step(session)
            print(json.dumps({"ready": True}), flush=True)
            while sys.stdin.readline():
                elapsed = []
                for _ in range(arguments.steps):
                    start = time.monotonic_ns()
                    step(session)
                    elapsed.append(time.monotonic_ns() - start)
                print(json.dumps(elapsed), flush=True)


if __name__ == "__main__":
    main()
