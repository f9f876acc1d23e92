"""Verbs between two machines: two guests on a virtual wire, which netem disturbs (on one machine it cannot act)."""

from __future__ import annotations

import sys

import pytest

from harness.launch import vm
from harness.tests.two_hosts import CONDITIONS
from runtime.errors import UnavailableError


@pytest.mark.guest
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_content_survives_a_bad_wire_and_a_dead_one_is_named() -> None:
    try:
        choice = vm.choose(vm.guest_accelerator())
    except UnavailableError as error:
        pytest.skip(str(error))
    outcomes = vm.run_pair([sys.executable, "-m", "harness.tests.two_hosts"], choice=choice, timeout=540)
    served, fetched = outcomes
    assert served.returncode == 0, served.output
    assert fetched.returncode == 0, fetched.output
    for label in CONDITIONS:
        assert f"{label}: content verified" in fetched.output
    assert "link down: " in fetched.output
