"""The contract over every transport that can run here.

VERBFLOW_CONTRACT_TRANSPORTS (names, comma-separated) narrows the list, as inside the soft-RoCE guest;
VERBFLOW_CONTRACT_BYTES bounds the sizes.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import psutil
import pytest

from runtime.tests import contract, contract_failures, contract_static
from runtime.tests.pairwise import pairwise
from runtime.transport.registry import known, transport_class

TRANSPORTS = [name for name in known() if name != "null"]
SELECTED = os.environ.get("VERBFLOW_CONTRACT_TRANSPORTS", ",".join(TRANSPORTS)).split(",")
ONE_PROCESS_ONLY = {"inproc": {"check_two_processes", "check_peer_killed", "check_peer_stopped"}}
SLOW = {"check_gibibyte"}
CHECKS = {
    label: check
    for module in (contract, contract_failures, contract_static)
    for label, check in vars(module).items()
    if label.startswith("check_")
}


def cases() -> list[object]:
    return [
        pytest.param(
            name,
            check,
            id=f"{name}-{label.removeprefix('check_')}",
            marks=[pytest.mark.slow] if label in SLOW else [],
        )
        for name in SELECTED
        for label, check in CHECKS.items()
        if label not in ONE_PROCESS_ONLY.get(name, ())
    ]


@pytest.mark.parametrize(("name", "check"), cases())
def test_contract(name: str, check: Callable[[str], None]) -> None:
    availability = transport_class(name).probe()
    if not availability.ok:
        pytest.skip(f"{name}: {availability.reason}")
    if check is contract.check_gibibyte and (
        contract.LARGEST < 256 << 20 or psutil.virtual_memory().available < 6 << 30
    ):
        pytest.skip("1 GiB needs 6 GiB of free memory, and sizes that are not narrowed")
    check(name)


def test_pairwise_holds_every_pair() -> None:
    factors = {"a": [1, 2, 3], "b": "xy", "c": [True, False], "d": range(4)}
    rows = pairwise(factors)
    for left in factors:
        for right in factors:
            if left != right:
                seen = {(row[left], row[right]) for row in rows}
                assert len(seen) == len(factors[left]) * len(factors[right])
    assert len(rows) <= 20
