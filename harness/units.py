"""Units: the only place where quantities are parsed from text and formatted for people.

Inside, everything is an integer of bytes or nanoseconds. GB and GB/s are powers of ten; KiB, MiB and GiB never lose their i.
"""

from __future__ import annotations

import re

from harness.errors import DefinitionError

_SIZES = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9,
    "kib": 2**10, "mib": 2**20, "gib": 2**30,
}  # fmt: skip
_DURATIONS = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9, "min": 60 * 10**9, "h": 3600 * 10**9}
_RATES = {"kbit/s": 10**3, "mbit/s": 10**6, "gbit/s": 10**9}
_QUANTITY = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z/]*)\s*")


def parse_size(value: object) -> int:
    """Bytes of ``4096``, ``"4KiB"``, ``"1.5 MB"``; DefinitionError names the known units."""
    return _parse(value, _SIZES, "size", "B, kB, MB, GB (powers of ten), KiB, MiB, GiB (powers of two)")


def parse_duration(value: object) -> int:
    """Nanoseconds of ``"200ms"``, ``"1.5s"``, ``"10min"``; a bare number is seconds."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        value = f"{value}s"
    return _parse(value, _DURATIONS, "duration", "ns, us, ms, s, min, h")


def parse_rate(value: object) -> int:
    """Bits a second of ``"1Gbit/s"``."""
    return _parse(value, _RATES, "rate", "kbit/s, Mbit/s, Gbit/s")


def _parse(value: object, units: dict[str, int], what: str, known: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and "" in units:
        if value < 0:
            raise DefinitionError(f"{what} {value} is negative")
        return value
    match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
    if match is None or match[2].lower() not in units:
        raise DefinitionError(f"{value!r} is not a {what}; write a number and one of {known}")
    amount = float(match[1]) * units[match[2].lower()]
    if amount != int(amount):
        raise DefinitionError(f"{what} {value!r} is not a whole number")
    return int(amount)


def format_bytes(nbytes: float) -> str:
    """``64 KiB`` where that is exact, ``246.6 MB`` otherwise."""
    whole = int(nbytes)
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if whole == nbytes and 0 < whole < 10_000 * size and whole % size == 0:
            return f"{whole // size} {unit}"
    for unit, decimal in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(nbytes) >= decimal:
            return f"{_digits(nbytes / decimal)} {unit}"
    return f"{_digits(nbytes)} B"


def format_ns(ns: float) -> str:
    """A duration with three significant digits: ``12.3 us``."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if abs(ns) >= size:
            return f"{_digits(ns / size)} {unit}"
    return f"{_digits(ns)} ns"


def format_rate(bytes_per_second: float) -> str:
    """GB/s or MB/s, powers of ten."""
    for unit, size in (("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if abs(bytes_per_second) >= size:
            return f"{_digits(bytes_per_second / size)} {unit}"
    return f"{_digits(bytes_per_second)} B/s"


def format_ratio(ratio: float) -> str:
    """A factor with three significant digits: ``1.25x``."""
    return f"{_digits(ratio)}x"


def _digits(value: float) -> str:
    if value == int(value) and abs(value) < 1000:
        return str(int(value))
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
