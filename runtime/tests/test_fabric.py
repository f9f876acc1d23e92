"""The emulated network: content is untouched, time is the ports'."""

import time

import numpy as np
import pytest

from runtime.deadline import Deadline
from runtime.errors import ConfigError
from runtime.testing import open_end, pair, pattern
from runtime.transport.onesided.fabric import Fabric


@pytest.fixture
def fabric(tmp_path):
    opened = Fabric(str(tmp_path / "fabric"), 1e6)
    yield opened
    opened.close()


# So long on the wire that the port is still taken when the next transfer is reserved, however busy the machine is.
LONG = 60_000_000


def test_transfers_of_one_sender_follow_each_other(fabric):
    now = time.monotonic_ns()
    first = fabric.reserve("a", "b", LONG)
    second = fabric.reserve("a", "c", 1000)
    assert first - now >= 60_000_000_000
    assert second - first == 1_000_000


def test_transfers_to_one_receiver_follow_each_other(fabric):
    first = fabric.reserve("a", "c", LONG)
    assert fabric.reserve("b", "c", 3000) - first == 3_000_000


def test_the_two_directions_of_a_port_and_other_ports_are_free(fabric):
    taken = fabric.reserve("a", "b", LONG)
    assert fabric.reserve("b", "a", 1000) < taken
    assert fabric.reserve("c", "d", 1000) < taken


def test_all_who_open_the_file_share_its_ports(fabric, tmp_path):
    first = fabric.reserve("a", "b", LONG)
    other = Fabric(str(tmp_path / "fabric"), 1e6)
    try:
        assert other.reserve("c", "b", 1000) - first == 1_000_000
    finally:
        other.close()


def test_a_rate_that_is_none_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="fabric_rate"):
        Fabric(str(tmp_path / "fabric"), 0)


@pytest.mark.parametrize("protocol", ["eager", "read", "write"])
def test_fetches_take_the_wires_time_and_bring_the_bytes(tmp_path, protocol):
    params = {
        "fabric": str(tmp_path / "fabric"),
        "fabric_rate": 4e6,
        "protocol": protocol,
        "eager_threshold": 1 << 20 if protocol == "eager" else 4096,
    }
    deadline = Deadline.after(30)
    with pair("shm", params=params) as (mine, theirs):
        tensors = {f"k{i}": pattern(100_000, seed=i) for i in range(4)}
        for key, tensor in tensors.items():
            theirs.source.put(key, tensor)
        begin = time.monotonic()
        futures = {key: mine.channel.fetch(key, deadline=deadline) for key in tensors}
        for key, future in futures.items():
            np.testing.assert_array_equal(future.result(deadline), tensors[key])
        # A wait that is too short is the defect here; how much longer it takes depends on the machine.
        assert time.monotonic() - begin >= 4 * 100_000 / 4e6


def test_a_fabric_without_a_rate_is_a_clear_error(tmp_path):
    with pytest.raises(ConfigError, match="fabric_rate"):
        open_end("shm", params={"fabric": str(tmp_path / "fabric")})
