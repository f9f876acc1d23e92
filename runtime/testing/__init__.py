"""What tests and benchmarks of the transports stand on: connected ends, real processes, and content that shows any misrouting.

Part of the runtime and not of its tests, because the harness and users who write a transport need it too.
"""

from runtime.testing.ends import (
    End,
    Guarded,
    Shelf,
    eventually,
    faulty,
    open_end,
    pair,
    pattern,
    pattern_tensor,
    same_bytes,
)
from runtime.testing.ranks import Rank, RankFailure, spawn

__all__ = [
    "End",
    "Guarded",
    "Rank",
    "RankFailure",
    "Shelf",
    "eventually",
    "faulty",
    "open_end",
    "pair",
    "pattern",
    "pattern_tensor",
    "same_bytes",
    "spawn",
]
