"""Graphs of operations. Importing this package registers every op, so that any stored graph can be read."""

from runtime.graph import (
    apply_ops,
    array_ops,
    math_ops,
    nn_ops,
    queue_ops,
    reduction_ops,
    replica_ops,
    state_ops,
    synthetic_ops,
    transfer_ops,
)

__all__ = [
    "apply_ops",
    "array_ops",
    "math_ops",
    "nn_ops",
    "queue_ops",
    "reduction_ops",
    "replica_ops",
    "state_ops",
    "synthetic_ops",
    "transfer_ops",
]
