"""The registry of transports, their settings, and the two that move nothing between processes."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import numpy as np
import pytest

from runtime.deadline import Deadline
from runtime.errors import ChannelClosedError, ConfigError, UnavailableError
from runtime.memory.arena import Arena
from runtime.testing import Shelf, open_end, pair, pattern
from runtime.transport.base import Availability, Options
from runtime.transport.inproc import InprocTransport
from runtime.transport.registry import known, open_transport, transport_class


def soon() -> Deadline:
    return Deadline.after(30)


def test_unknown_name_lists_the_known_ones() -> None:
    with contextlib.closing(Arena(1 << 16)) as arena, pytest.raises(ConfigError) as raised:
        open_transport("carrier_pigeon", Options(), arena)
    assert all(name in str(raised.value) for name in known())


def test_classes_carry_their_names() -> None:
    for name in ("inproc", "null", "grpc", "grpc_proto"):
        assert transport_class(name).name == name
        assert transport_class(name).probe().ok


def test_unavailable_says_why_and_nothing_else_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InprocTransport, "probe", classmethod(lambda cls: Availability(False, "it is Sunday")))
    with contextlib.closing(Arena(1 << 16)) as arena, pytest.raises(UnavailableError, match="it is Sunday"):
        open_transport("inproc", Options(), arena)


def test_nobody_pays_for_grpc_or_verbs_without_using_them() -> None:
    script = (
        "import sys, runtime.transport.registry, runtime.transport.inproc, runtime.wire\n"
        "print([name for name in ('grpc', 'pyverbs', 'google.protobuf', 'pandas') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("name", "params", "text"),
    [
        ("grpc", {"chunk_byte": 1}, "chunk_bytes"),
        ("grpc", {"chunk_bytes": "1 MiB"}, "takes int"),
        ("grpc", {"chunk_bytes": True}, "takes int"),
        ("grpc", {"chunk_bytes": 3}, "between"),
        ("grpc", {"keepalive_s": -1}, "positive"),
        ("grpc_proto", {"allocator": "magic"}, "neither"),
        ("grpc", {"tls_cert": "x"}, "belong together"),
        ("inproc", {"x": 1}, "known: none"),
    ],
)
def test_settings_are_checked_when_opened(name: str, params: dict[str, object], text: str) -> None:
    with contextlib.closing(Arena(1 << 16)) as arena, pytest.raises(ConfigError, match=text):
        open_transport(name, Options(params=params), arena)


def test_null_answers_at_once_and_moves_nothing() -> None:
    end = open_end("null", params={"nbytes": 100})
    filled = open_end("null", params={"fill": 7})
    with contextlib.closing(end), contextlib.closing(filled):
        assert end.listen() == b"null"
        channel = end.transport.connect(b"anywhere", peer="nobody", deadline=soon())
        into = pattern(1000)
        assert channel.fetch("key", into, deadline=soon()).result(soon()) is into
        assert np.array_equal(into, pattern(1000))
        assert np.array_equal(channel.fetch("key", deadline=soon()).result(soon()), np.zeros(100, np.uint8))
        other = filled.transport.connect(b"null", peer="nobody", deadline=soon())
        assert (other.fetch("key", into, deadline=soon()).result(soon()) == 7).all()
        assert (end.transport.totals().fetches, end.transport.totals().bytes_in) == (2, 0)
        channel.close()
        assert isinstance(channel.fetch("key", deadline=soon()).exception(soon()), ChannelClosedError)


def test_listening_twice_is_refused() -> None:
    for name in ("inproc", "grpc"):
        with pair(name) as (client, _), pytest.raises(OSError, match="listens already"):
            client.transport.listen(Shelf())


@pytest.mark.parametrize("name", ["inproc", "null", "grpc", "grpc_proto"])
def test_a_closed_channel_leaves_its_counters_and_nothing_else(name: str) -> None:
    with contextlib.closing(open_end(name)) as server, contextlib.closing(open_end(name)) as client:
        server.source.put("key", pattern(8))
        address = server.listen()
        for _ in range(3):
            channel = client.transport.connect(address, peer="/job:test/task:1", deadline=soon())
            channel.fetch("key", deadline=soon()).result(soon())
            assert list(client.transport.channels) == [channel]  # type: ignore[attr-defined]
            channel.close()
            channel.close()
        assert list(client.transport.channels) == []  # type: ignore[attr-defined]
        assert client.transport.totals().fetches == 3
