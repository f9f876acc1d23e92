"""Peers: what the same transfer costs in other systems, in the same run and the same tables. All optional."""
