"""``python -m harness.bench.peers.tensorflow_job JSON``: one task of a TensorFlow 1.x job, for ``cluster_peers``.

Keys: ``cluster``, ``job``, ``task``; workers also ``what`` ("op": run one op of the server's again and again; "alexnet":
asynchronous training of the single-tower AlexNet of 61.1 million parameters), ``batch``, ``steps``, ``warmup``. A worker waits
for one line on its standard input before each round, and answers with one line: the round's nanoseconds, a step each.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any


def alexnet_step(v1: Any, session: Any, options: dict[str, Any]) -> Callable[[], object]:
    import numpy as np

    tf = sys.modules["tensorflow"]

    def weights(name: str, shape: list[int]) -> tuple[Any, Any]:
        deviation = (2 / np.prod(shape[:-1])) ** 0.5
        kernel = v1.get_variable(
            f"{name}/weights", shape, initializer=v1.random_normal_initializer(stddev=deviation), use_resource=False
        )
        return kernel, v1.get_variable(
            f"{name}/biases", shape[-1:], initializer=v1.zeros_initializer(), use_resource=False
        )

    def conv(x: Any, name: str, size: int, units: int, stride: int = 1, padding: str = "SAME") -> Any:
        kernel, bias = weights(name, [size, size, int(x.shape[-1]), units])
        return tf.nn.relu(tf.nn.bias_add(v1.nn.conv2d(x, kernel, strides=stride, padding=padding), bias))

    def pool(x: Any) -> Any:
        return v1.nn.max_pool(x, 3, 2, "VALID")

    def dense(x: Any, name: str, units: int) -> Any:
        kernel, bias = weights(name, [int(x.shape[-1]), units])
        return tf.matmul(x, kernel) + bias

    batch = options["batch"]
    images, labels = v1.placeholder("float32", [batch, 227, 227, 3]), v1.placeholder("int32", [batch])
    x = pool(conv(images, "conv1", 11, 64, 4, "VALID"))
    x = pool(conv(x, "conv2", 5, 192))
    x = conv(conv(conv(x, "conv3", 3, 384), "conv4", 3, 256), "conv5", 3, 256)
    x = tf.reshape(pool(x), [batch, -1])
    x = tf.nn.relu(dense(x, "fc6", 4096))
    x = tf.nn.relu(dense(x, "fc7", 4096))
    logits = dense(x, "fc8", 1000)
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))
    train = v1.train.GradientDescentOptimizer(0.001).minimize(loss)
    random = np.random.default_rng(options["task"])
    feeds = {
        images: random.random((batch, 227, 227, 3), np.float32),
        labels: random.integers(0, 1000, batch).astype(np.int32),
    }
    return lambda: session().run([loss, train], feeds)


def op_step(v1: Any, session: Any, options: dict[str, Any]) -> Callable[[], object]:
    with v1.device("/job:ps/task:0"):
        value = v1.get_variable("value", [4], initializer=v1.ones_initializer(), use_resource=False)
        doubled = value + value
    return lambda: session().run(doubled)


def main() -> None:
    options = json.loads(sys.argv[1])
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import tensorflow as tf

    v1 = tf.compat.v1
    v1.disable_eager_execution()
    server = v1.train.Server(options["cluster"], job_name=options["job"], task_index=options["task"])
    if options["job"] == "ps":
        print(json.dumps({"ready": True}), flush=True)
        sys.stdin.read()
        os._exit(0)  # a TensorFlow server cannot be stopped
    opened: list[Any] = []
    with v1.device(v1.train.replica_device_setter(worker_device=f"/job:worker/task:{options['task']}", ps_tasks=1)):
        build = {"op": op_step, "alexnet": alexnet_step}[options["what"]]
        step = build(v1, lambda: opened[0], options)
        initialise = v1.global_variables_initializer()
    with v1.Session(server.target) as session:
        opened.append(session)
        session.run(initialise)
        for _ in range(options["warmup"]):
            step()
        print(json.dumps({"ready": True}), flush=True)
        while sys.stdin.readline():
            elapsed = []
            for _ in range(options["steps"]):
                start = time.monotonic_ns()
                step()
                elapsed.append(time.monotonic_ns() - start)
            print(json.dumps(elapsed), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
