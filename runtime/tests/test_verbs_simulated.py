"""The contract over the verbs transport on a simulated device: everything of it but the adapter, at native speed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from runtime.errors import ConfigError, UnavailableError
from runtime.memory.arena import Arena
from runtime.testing import open_end
from runtime.tests import contract
from runtime.tests.test_contract import CHECKS
from runtime.tests.verbs_simulation import PLACE, objects, simulate
from runtime.transport.base import Options
from runtime.transport.onesided.progress import Progress
from runtime.transport.verbs import transport
from runtime.transport.verbs.bootstrap import Address, machine_id

# Two processes share no simulated device; the largest sizes are for real ones.
LEFT_OUT = ("process", "killed", "stopped", "gibibyte", "version")
SINGLE = {label: check for label, check in CHECKS.items() if not any(word in label for word in LEFT_OUT)}


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    simulate(monkeypatch)
    monkeypatch.setattr(contract, "LARGEST", 16 << 20)


@pytest.mark.parametrize("check", [pytest.param(check, id=label) for label, check in SINGLE.items()])
def test_contract(check: Callable[[str], None]) -> None:
    before = objects()
    check("verbs")
    assert objects() == before, "a queue pair or a memory region was left behind"


@pytest.mark.parametrize("protocol", ["eager", "read", "write", "paper_read", "paper_write"])
def test_contents_by_every_protocol(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "LARGEST", 1 << 20)
    opening = contract.pair
    monkeypatch.setattr(
        contract, "pair", lambda name, *rest, **options: opening(name, *rest, params={"protocol": protocol}, **options)
    )
    contract.check_sizes("verbs")
    contract.check_many_keys_at_once("verbs")


def test_an_address_is_reached_on_the_same_fabric_only() -> None:
    end = open_end("verbs")
    try:
        ours = Address("h", 1, "Ethernet", PLACE.gid.raw.hex(), machine_id(), False)
        elsewhere = Address("h", 1, "Ethernet", PLACE.gid.raw.hex(), "another-machine", False)
        dummy = Address("h", 1, "Ethernet", PLACE.gid.raw.hex(), "another-machine", True)
        infiniband = Address("h", 1, "InfiniBand", PLACE.gid.raw.hex(), "another-machine", False)
        reached = [end.transport.reaches(address.encode()) for address in (ours, elsewhere, dummy, infiniband)]
        assert reached == [True, True, False, False]
        assert not end.transport.reaches(b"an address of another transport")
    finally:
        end.close()


def test_a_setting_out_of_range_opens_nothing() -> None:
    before = objects()
    arena = Arena(1 << 16)
    with pytest.raises(ConfigError, match="send_depth"):
        transport.VerbsTransport(Options(params={"send_depth": 1}), arena)
    assert objects() == before
    arena.close()


@pytest.mark.parametrize("step", ["load_binding", "choose_place", "Memory"])
def test_what_cannot_be_opened_leaves_nothing(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise UnavailableError(f"no {step}")

    closed: list[Progress] = []
    close = Progress.close
    monkeypatch.setattr(Progress, "close", lambda progress: (closed.append(progress), close(progress))[1])
    monkeypatch.setattr(transport, step, fails)
    before = objects()
    arena = Arena(1 << 16)
    with pytest.raises(UnavailableError, match=f"no {step}"):
        transport.VerbsTransport(Options(), arena)
    assert len(closed) == 1 and objects() == before
    arena.close()
