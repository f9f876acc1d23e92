"""Graphs of operations. Importing this package registers every op, so that any stored graph can be read."""

from runtime.graph import apply_ops, array_ops, math_ops, reduction_ops, state_ops

__all__ = ["apply_ops", "array_ops", "math_ops", "reduction_ops", "state_ops"]
