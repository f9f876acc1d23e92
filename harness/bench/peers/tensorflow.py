"""tensorflow: fetch of a variable from a parameter server by TensorFlow's own gRPC runtime, as users of TF 1.x have it."""

from __future__ import annotations

import json
import socket
import sys
import time
from dataclasses import dataclass

from harness.bench.base import RankContext, parameter
from harness.bench.peers.program import Program, peer_python, require_module


@dataclass(frozen=True)
class TensorFlowParams:
    transport: str = parameter(
        "tensorflow", "the name under which rows are drawn", unit="text", choices=("tensorflow",)
    )
    nbytes: int = parameter(4096, "tensor size", unit="bytes", at_least=4, at_most=1 << 30)


class TensorFlowFetch(Program):
    name = "tensorflow"
    summary = "TensorFlow's gRPC: session.run of a remote variable (optional)"
    Params = TensorFlowParams

    def setup(self, ctx: RankContext, p: TensorFlowParams) -> TensorFlowParams:
        require_module("tensorflow", "tensorflow-cpu")
        return p

    def command(self, p: TensorFlowParams, count: int) -> list[str]:
        return [peer_python(), "-m", "harness.bench.peers.tensorflow", str(p.nbytes), str(count)]


def serve(cluster: dict[str, list[str]]) -> None:
    """The parameter server; runs until it is killed."""
    import tensorflow as tf

    tf.compat.v1.train.Server(cluster, job_name="ps", task_index=0).join()


def main() -> None:
    """``tensorflow.py NBYTES COUNT``: start the server, fetch, print the durations."""
    import multiprocessing

    import tensorflow as tf

    v1 = tf.compat.v1
    v1.disable_eager_execution()
    nbytes, count = int(sys.argv[1]), int(sys.argv[2])
    cluster = {"ps": [_free_address()], "worker": [_free_address()]}
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(cluster,), daemon=True)
    server.start()
    worker = v1.train.Server(cluster, job_name="worker", task_index=0)
    with tf.device("/job:ps/task:0"):
        shared = v1.get_variable("shared", shape=(nbytes // 4,), initializer=v1.ones_initializer(), use_resource=False)
    config = v1.ConfigProto()
    # Grappler prunes pulls that nothing consumes.
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    elapsed = []
    with v1.Session(worker.target, config=config) as session:
        session.run(v1.global_variables_initializer())
        for _ in range(count + 2):
            start = time.monotonic_ns()
            value = session.run(shared)
            elapsed.append(time.monotonic_ns() - start)
    assert (value == 1).all(), "TensorFlow delivered other values"
    print(json.dumps(elapsed[2:]))
    server.kill()


def _free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


if __name__ == "__main__":
    main()
