"""Sweep: the values of an axis as people write them, and the combinations of several axes.

"4KiB..256MiB *4"   4 KiB, 16 KiB, ... 256 MiB
"1..7 +2"           1, 3, 5, 7
"1..4"              1, 2, 3, 4
["grpc", "shm"]     these
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from harness.errors import DefinitionError

MAX_VALUES = 10_000
_RANGE = re.compile(
    r"\s*(?P<first>[^.\s]+(?:\.\d+)?\S*?)\s*\.\.\s*(?P<last>\S+)(?:\s+(?P<kind>[*+])\s*(?P<step>\S+))?\s*"
)


def axis_values(value: Any, parse: Callable[[Any], Any]) -> list[Any]:
    """The values that an axis stands for, each through ``parse``, without repeats and in the order written.

    A list may hold ranges. DefinitionError says what is wrong with a range.
    """
    items = list(value) if isinstance(value, (list, tuple)) else [value]
    if not items:
        raise DefinitionError("an axis needs at least one value")
    values: list[Any] = []
    for item in items:
        values.extend(_range(item, parse) if isinstance(item, str) and ".." in item else [parse(item)])
    return list(dict.fromkeys(values))


def _range(text: str, parse: Callable[[Any], Any]) -> list[Any]:
    match = _RANGE.fullmatch(text)
    if match is None:
        raise DefinitionError(f"{text!r} is not a range; write FIRST..LAST, FIRST..LAST *FACTOR or FIRST..LAST +STEP")
    first, last = parse(match["first"]), parse(match["last"])
    if not isinstance(first, int) or not isinstance(last, int):
        raise DefinitionError(f"range {text!r} needs numbers at both ends")
    if first > last:
        raise DefinitionError(f"range {text!r} is empty: its first value is larger than its last")
    if match["kind"] == "*":
        factor = _positive(match["step"], text, int)
        if factor < 2:
            raise DefinitionError(f"range {text!r}: a factor is at least 2")
        if first == 0:
            raise DefinitionError(f'range {text!r}: 0 times a factor stays 0; write [0, "..."]')
        values = [first]
        while values[-1] * factor <= last:
            values.append(values[-1] * factor)
    else:
        step = _positive(match["step"], text, parse) if match["kind"] else 1
        if (last - first) // step >= MAX_VALUES:
            raise DefinitionError(f"range {text!r} has more than {MAX_VALUES} values; give it a step or a factor")
        values = list(range(first, last + 1, step))
    return values


def _positive(text: str, whole: str, parse: Callable[[Any], Any]) -> int:
    try:
        number = parse(text)
    except ValueError:
        raise DefinitionError(f"range {whole!r}: {text!r} is not a number") from None
    if not isinstance(number, int) or number < 1:
        raise DefinitionError(f"range {whole!r}: {text!r} is not a whole number from 1")
    return number


def combinations(
    axes: Mapping[str, Sequence[Any]], excludes: Sequence[Mapping[str, Sequence[Any]]] = ()
) -> list[dict[str, Any]]:
    """The cross product of the axes, last axis fastest, less every combination that an exclude matches.

    An exclude matches when, for each of its keys, the combination's value is one of those listed.
    """
    names = list(axes)
    product = (dict(zip(names, values)) for values in itertools.product(*axes.values()))
    return [
        chosen
        for chosen in product
        if not any(all(chosen.get(name) in values for name, values in exclude.items()) for exclude in excludes)
    ]
