"""Spinning: how long a thread polls before it sleeps, learnt from how long it had to wait."""

from __future__ import annotations

# What a wake-up may add to a wait that was just missed: the margin by which a spin is made longer than the last wait.
_MARGIN = 1.25


class Spinning:
    """Grows while what is waited for comes soon after the thread went to sleep, and falls back once it does not.

    A wake-up costs 45 us and more, so sleeping through a wait of 100 us makes it half as long again; a thread that spins
    through a wait of 10 ms only burns a processor. KVM's halt polling (virt/kvm/kvm_main.c, ``halt_poll_ns``) decides
    the same way. One thread at a time uses it.
    """

    def __init__(self, least_us: int, most_us: int) -> None:
        """``least_us``: always; 0 is never, whatever comes. ``most_us``: no longer than that."""
        self.ns = least_us * 1000
        self._least_ns = self.ns
        self._most_ns = max(most_us * 1000, self.ns) if least_us else 0

    def waited(self, ns: int) -> None:
        """Something came after ``ns``, and the thread was asleep by then."""
        self.ns = min(int(ns * _MARGIN), self._most_ns) if self._least_ns <= ns < self._most_ns else self._least_ns
