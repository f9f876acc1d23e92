"""Graphs of operations. Importing this package registers every op, so that any stored graph can be read."""

from runtime.graph import array_ops, math_ops, reduction_ops

__all__ = ["array_ops", "math_ops", "reduction_ops"]
