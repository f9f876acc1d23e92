"""The bindings to RDMA libraries, over fake libraries of the shapes that there are."""

from __future__ import annotations

import importlib
import os
import sys
import types
from typing import Any

import pytest

from runtime.errors import (
    ConfigError,
    TransportError,
    UnavailableError,
)
from runtime.transport.verbs import binding
from runtime.transport.verbs.binding import AsyncEvent, Status, load_binding


def test_an_unknown_binding_is_refused() -> None:
    with pytest.raises(ConfigError, match="pyverbs"):
        load_binding("rdmacm")


def test_a_missing_library_is_named_with_where_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pyverbs", "ibverbs"):
        monkeypatch.setitem(sys.modules, name, None)
        for module in [m for m in sys.modules if m.startswith(f"{name}.") or m.endswith(f"{name}_binding")]:
            monkeypatch.delitem(sys.modules, module)
    with pytest.raises(UnavailableError, match=r"pip install 'verbflow\[ibverbs\]'"):
        load_binding("ibverbs")
    with pytest.raises(UnavailableError, match="make setup"):
        load_binding("auto")


def test_our_constants_are_the_librarys() -> None:
    try:
        names: Any = importlib.import_module("pyverbs.enums")  # to 58
    except ImportError:
        names = pytest.importorskip("pyverbs.libibverbs_enums", reason="python3-pyverbs is not installed")
    pairs = {
        "IBV_WR_RDMA_WRITE": binding.Opcode.WRITE, "IBV_WR_RDMA_WRITE_WITH_IMM": binding.Opcode.WRITE_IMM,
        "IBV_WR_SEND": binding.Opcode.SEND, "IBV_WR_RDMA_READ": binding.Opcode.READ,
        "IBV_QPS_INIT": binding.QpState.INIT, "IBV_QPS_RTR": binding.QpState.RTR,
        "IBV_QPS_RTS": binding.QpState.RTS, "IBV_QPS_ERR": binding.QpState.ERR,
        "IBV_WC_RECV": binding.RECV, "IBV_WC_RECV_RDMA_WITH_IMM": binding.RECV_IMM,
        "IBV_WC_RETRY_EXC_ERR": Status.RETRY_EXC_ERR, "IBV_WC_WR_FLUSH_ERR": Status.WR_FLUSH_ERR,
        "IBV_WC_REM_ACCESS_ERR": Status.REM_ACCESS_ERR, "IBV_WC_RNR_RETRY_EXC_ERR": Status.RNR_RETRY_EXC_ERR,
        "IBV_SEND_SIGNALED": binding.SIGNALED, "IBV_SEND_INLINE": binding.INLINE,
        "IBV_ACCESS_LOCAL_WRITE": binding.LOCAL_WRITE, "IBV_ACCESS_REMOTE_WRITE": binding.REMOTE_WRITE,
        "IBV_ACCESS_REMOTE_READ": binding.REMOTE_READ, "IBV_QPT_RC": binding.QPT_RC,
        "IBV_LINK_LAYER_ETHERNET": binding.LINK_LAYER_ETHERNET, "IBV_PORT_ACTIVE": binding.PORT_ACTIVE,
        "IBV_EVENT_PORT_ERR": AsyncEvent.PORT_ERR, "IBV_EVENT_DEVICE_FATAL": AsyncEvent.DEVICE_FATAL,
        "IBV_EVENT_GID_CHANGE": AsyncEvent.GID_CHANGE, "IBV_EVENT_QP_FATAL": AsyncEvent.QP_FATAL,
        "IBV_QP_AV": binding.ADDRESS_VECTOR_MASK,
    }  # fmt: skip
    masks = {
        "qp_state": "STATE", "qp_access_flags": "ACCESS_FLAGS", "pkey_index": "PKEY_INDEX", "port_num": "PORT",
        "path_mtu": "PATH_MTU", "timeout": "TIMEOUT", "retry_cnt": "RETRY_CNT", "rnr_retry": "RNR_RETRY",
        "rq_psn": "RQ_PSN", "max_rd_atomic": "MAX_QP_RD_ATOMIC", "min_rnr_timer": "MIN_RNR_TIMER", "sq_psn": "SQ_PSN",
        "max_dest_rd_atomic": "MAX_DEST_RD_ATOMIC", "dest_qp_num": "DEST_QPN",
    }  # fmt: skip
    assert masks.keys() == binding.ATTRIBUTE_MASKS.keys()
    pairs |= {f"IBV_QP_{name}": binding.ATTRIBUTE_MASKS[field] for field, name in masks.items()}
    for name, value in pairs.items():
        assert int(getattr(names, name)) == int(value), name


class FakeError(Exception):
    """PyverbsRDMAError as both old and new releases raise it."""

    def __init__(self, text: str, error_code: int = 0) -> None:
        super().__init__(text)
        self.error_code = error_code


class Sge:
    """pyverbs' SGE: a struct on the heap that must not be freed twice."""

    def __init__(self, addr: int, length: int, lkey: int) -> None:
        self.addr, self.length, self.lkey = addr, length, lkey
        self.closed = 0

    def close(self) -> None:
        self.closed += 1
        assert self.closed == 1, "double free"


class Request:
    """pyverbs' SendWR and RecvWR: keep a copy of the elements until one is put in their place."""

    def __init__(self, **fields: Any) -> None:
        self.fields = fields
        self.own_copy = True
        self.sg_list: Any = None
        self.chain = fields.get("next_wr")
        self.wr_id = fields.get("wr_id")

    def set_wr_rdma(self, rkey: int, address: int) -> None:
        self.remote = (rkey, address)

    def close(self) -> None:
        assert self.own_copy, "double free"
        self.own_copy = False


def fake_pyverbs(monkeypatch: pytest.MonkeyPatch, shows_descriptors: bool) -> Any:
    """A library of the shape of pyverbs 44 (channels hide their descriptor) or of 59 (they show it, and there is no
    ``pyverbs.enums``). Event descriptors are eventfds: the binding must be told what to look for."""
    log: list[Any] = []

    class Closing:
        def close(self) -> None:
            log.append(("close", type(self).__name__))

    class Opening(Closing):
        def __init__(self, *_: Any, **__: Any) -> None:
            self.descriptor = os.eventfd(0)
            if shows_descriptors:
                self.fd = self.descriptor

        def close(self) -> None:
            super().close()
            os.close(self.descriptor)

    class Context(Opening):
        def get_async_event(self) -> Any:
            assert not os.get_blocking(self.descriptor)
            raise FakeError("Failed to get an async event", 11)

    class CompChannel(Opening):
        def get_cq_event(self, cq: Any) -> None:
            assert not os.get_blocking(self.descriptor), "would stop every thread of the process"
            os.eventfd_read(self.descriptor) if cq.rung else self.nothing()
            cq.rung = False

        def nothing(self) -> None:
            raise FakeError("Failed to get CQ event", 11)

    class MR(Closing):
        def __init__(self, domain: Any, nbytes: int, access: int, address: int) -> None:
            self.lkey, self.rkey = address + 1, address + 2

        def close(self) -> None:
            super().close()
            if self.lkey == 667:
                raise FakeError("Failed to dereg MR", 16)

    class CQ(Closing):
        def __init__(self, context: Any, cqe: int, cookie: Any, channel: Any, vector: int) -> None:
            self.channel, self.rung, self.acked = channel, False, 0

        def ring(self) -> None:
            self.rung = True
            os.eventfd_write(self.channel.descriptor, 1)

        def ack_events(self, count: int) -> None:
            self.acked += count

    class QP(Closing):
        qp_num = 42

        def __init__(self, domain: Any, init: Any) -> None:
            self.posted: list[Any] = []

        def post_send(self, request: Any) -> None:
            if request.sg_list.lkey == 666:
                raise FakeError("Failed to post send", 22)
            self.posted.append((request.fields["opcode"], request.wr_id, request.sg_list.addr, request.send_flags))

        def post_recv(self, request: Any) -> None:
            while request is not None:
                self.posted.append(request.wr_id)
                request = request.chain

    shapes: dict[str, dict[str, Any]] = {
        "addr": {"GID": Request, "AHAttr": Request, "GlobalRoute": Request},
        "cq": {"CQ": CQ, "CompChannel": CompChannel},
        "device": {"Context": Context},
        "mr": {"MR": MR},
        "pd": {"PD": lambda context: Closing()},
        "pyverbs_error": {"PyverbsError": FakeError},
        "qp": {
            "QP": QP,
            "QPAttr": Request,
            "QPCap": Request,
            "QPInitAttr": lambda **fields: types.SimpleNamespace(
                max_inline_data=fields["cap"].fields["max_inline_data"]
            ),
        },
        "wr": {"SGE": Sge, "RecvWR": Request, "SendWR": Request},
    }
    package = types.ModuleType("pyverbs")
    package.__path__ = []  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pyverbs", package)
    for name, content in shapes.items():
        module = types.ModuleType(f"pyverbs.{name}")
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, f"pyverbs.{name}", module)
    for gone in ("pyverbs.enums", "pyverbs.libibverbs_enums"):
        monkeypatch.setitem(sys.modules, gone, None)
    monkeypatch.delitem(sys.modules, "runtime.transport.verbs.pyverbs_binding", raising=False)
    module = importlib.import_module("runtime.transport.verbs.pyverbs_binding")
    monkeypatch.setattr(module, "_EVENT_LINK", "anon_inode:[eventfd]")
    monkeypatch.setitem(sys.modules, "runtime.transport.verbs.pyverbs_binding", module)
    return module, log


@pytest.mark.parametrize("shows_descriptors", [False, True], ids=["like 44", "like 59"])
def test_pyverbs_of_either_shape(monkeypatch: pytest.MonkeyPatch, shows_descriptors: bool) -> None:
    module, log = fake_pyverbs(monkeypatch, shows_descriptors)
    opened = module.PyverbsBinding().open("rxe0")
    assert opened.async_events() == []
    pair = opened.queue_pair(8, 8, 256)
    assert (pair.number, pair.max_inline) == (42, 256)
    assert pair.fd == pair._channel.descriptor
    assert not pair.take_event()
    pair._cq.ring()
    assert pair.take_event() and pair._cq.acked == 1

    pair.post(binding.Opcode.WRITE_IMM, 5, 4096, 100, 1, binding.SIGNALED, 1 << 40, 77, 0xFFFFFFFF)
    request, element = pair._requests[binding.Opcode.WRITE_IMM]
    assert (request.remote, request.imm_data, element.length) == ((77, 1 << 40), 0xFFFFFFFF, 100)
    assert request.sg_list is element, "the request and its element share memory, so setting the element is enough"
    with pytest.raises(TransportError, match="Failed to post send") as failed:
        pair.post(binding.Opcode.SEND, 6, 4096, 100, 666, 0)
    assert failed.value.errno == 22

    pair._qp.posted.clear()
    pair.prepare_receives(1000, [64 * at for at in range(6)], 64, 1, 2)
    for group in (1, 0, 2):
        pair.post_receives(group)
    assert pair._qp.posted == [1002, 1003, 1000, 1001, 1004, 1005]

    requests = pair._requests
    pair.close()
    pair.close()
    assert [name for _, name in log] == ["QP", "CQ", "CompChannel"], "in this order, once"
    again = opened.queue_pair(8, 8, 0)
    assert again._requests is requests, "requests are used again, never freed"
    again.close()
    opened.close()


def test_a_region_has_the_librarys_keys_and_its_errors_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    module, log = fake_pyverbs(monkeypatch, shows_descriptors=True)
    opened = module.PyverbsBinding().open("rxe0")
    region = opened.register(4096, 64, binding.LOCAL_WRITE)
    assert (region.lkey, region.rkey) == (4097, 4098)
    region.close()
    assert log == [("close", "MR")]
    with pytest.raises(TransportError, match=r"deregistering memory: .*dereg") as failed:
        opened.register(666, 64, binding.LOCAL_WRITE).close()
    assert failed.value.errno == 16
    opened.close()
