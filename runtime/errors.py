"""The one error tree of the runtime.

A message says what was tried, with which peer and key, after how long, and what to do about it. Foreign errors (grpc,
pyverbs, OSError) are translated once, at the edge of the module that meets them, with ``raise ... from``.
"""

from __future__ import annotations


class VerbflowError(Exception):
    """Root of everything that Verbflow raises on purpose."""


class ConfigError(VerbflowError, ValueError):
    """An option, address, definition or cluster description that cannot be."""


class GraphError(VerbflowError, ValueError):
    """A graph that cannot be built, differentiated, placed, partitioned or fed."""


class ShapeError(GraphError):
    """Shapes or dtypes of an op's inputs do not fit; the message names the node and both shapes."""


class ArenaFullError(VerbflowError, MemoryError):
    """An arena has no room; the message lists its largest occupants."""


class CheckpointError(VerbflowError):
    """A checkpoint is absent, damaged, or of another model."""


class DeadlineError(VerbflowError, TimeoutError):
    """A wait ended at its deadline; the message says what was waited for and how long."""


class TransportError(VerbflowError, OSError):
    """Moving bytes to or from a peer failed."""


class UnavailableError(TransportError):
    """A transport cannot be used here; the message is ``probe().reason``."""


class PeerLostError(TransportError):
    """A peer died, closed the connection, or stopped answering."""


class ChannelClosedError(TransportError):
    """The channel was closed or aborted at this end; nothing more goes through it."""


class CorruptMessageError(TransportError):
    """Bytes from a peer do not follow the protocol. The connection is unusable afterwards: its position is unknown."""


class ProtocolMismatchError(TransportError):
    """The peer speaks another version, or was started with other options."""


class UnauthenticatedError(TransportError):
    """The peer did not show this run's token."""


class StepAbortedError(VerbflowError):
    """A step was given up because part of it failed; ``__cause__`` is the first failure."""


class UnknownGraphError(VerbflowError):
    """The worker does not know the graph handle, as after its restart (TensorFlow's Aborted)."""
