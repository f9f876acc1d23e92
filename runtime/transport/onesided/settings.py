"""Settings: the parameters of a one-sided transport, checked once when it is opened."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.errors import ConfigError

PROTOCOLS = ("auto", "eager", "read", "write", "paper_read", "paper_write")


@dataclass(frozen=True, slots=True)
class Settings:
    """What ``Options.params`` may say to every one-sided transport; an experiment can sweep each field. A transport with
    settings of its own derives from this class.

    protocol         how a fetch moves its bytes; ``auto``: eager to the threshold, then what the link prefers
    eager_threshold  bytes of tensor up to which ``auto`` copies through the message ring (a borrow: to 4 KiB at most)
    chunk_bytes      pieces in which a copy into staging memory overlaps the transfer, and longest single operation;
                     0: as long as the link allows
    inflight         fetches that may be outstanding on a channel; more wait at this end
    depth            messages that an end takes before it must poll (ring slots, posted receives)
    spin_us, spin_max_us   how long a waiting thread polls, yielding, before it sleeps on a descriptor: at least (0: never
                     polls), and at most where that pays (``spinning.py``)
    metadata_cache   keys whose shape a channel remembers, for ``write`` without a given destination
    message_reuse, tensor_reuse, pool   the paper's three optimisations; only ``paper_*`` look at them
    registration_bytes, registration_entries   bounds of the cache of registered foreign buffers
    fabric, fabric_rate   file of an emulated network that all tasks share, and its ports' bytes a second (``fabric.py``)
    """

    protocol: str = "auto"
    eager_threshold: int = 4096
    chunk_bytes: int = 0
    inflight: int = 256
    depth: int = 64
    spin_us: int = 60
    spin_max_us: int = 1000
    metadata_cache: int = 4096
    message_reuse: bool = True
    tensor_reuse: bool = True
    pool: bool = True
    registration_bytes: int = 256 << 20
    registration_entries: int = 256
    fabric: str = ""
    fabric_rate: float = 0.0

    def __post_init__(self) -> None:
        if self.protocol not in PROTOCOLS:
            raise ConfigError(f"protocol {self.protocol!r} is unknown; known: {', '.join(PROTOCOLS)}")
        bounds = {
            "eager_threshold": (0, 1 << 20),
            "chunk_bytes": (0, 1 << 40),
            "inflight": (1, 1 << 16),
            "depth": (16, 1 << 15),
            "spin_us": (0, 10_000),
            "spin_max_us": (0, 10_000),
            "metadata_cache": (0, 1 << 24),
            "registration_bytes": (0, 1 << 50),
            "registration_entries": (0, 1 << 20),
        }
        for name, (low, high) in bounds.items():
            if not low <= getattr(self, name) <= high:
                raise ConfigError(f"{name} = {getattr(self, name)} is not in {low}..{high}")
