"""Which device, port and GID a process uses, and whether it can use one at all. Read from sysfs, for both bindings.

GID indices move (removing and adding an address made index 1 to index 2), and index 0 is often a link-local address that
no other subnet reaches. So a GID is chosen by the address behind it, at the time it is needed.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from runtime.errors import ConfigError, UnavailableError
from runtime.transport.verbs.fidelity import SYSFS

ROCE_V2 = "RoCE v2"
INFINIBAND = "InfiniBand"
_ZERO_GID = bytes(16)
_MAPPED_PREFIX = bytes(10) + b"\xff\xff"
# The table has up to 1024 places and is filled from the front, with few holes; each look at one is a system call.
_EMPTY_PLACES_TO_GIVE_UP = 32
_CAP_IPC_LOCK = 14
_ENOUGH_LOCKED_BYTES = 64 << 20

NO_DEVICE_HINT = (
    "no RDMA device; without hardware load soft-RoCE (root: modprobe rdma_rxe && ip link add dummy0 type dummy && "
    "ip addr add 10.77.0.1/24 dev dummy0 && ip link set dummy0 mtu 4200 up && rdma link add rxe0 type rxe netdev dummy0), "
    "or run in the guest: make rxe-shell"
)


@dataclass(frozen=True, slots=True)
class Gid:
    """An entry of a port's GID table; ``kind`` is the kernel's word ("RoCE v2", "IB/RoCE v1")."""

    index: int
    raw: bytes
    kind: str

    @property
    def address(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
        address = ipaddress.IPv6Address(self.raw)
        return address.ipv4_mapped or address


@dataclass(frozen=True, slots=True)
class Port:
    """A port of a device as sysfs shows it."""

    device: str
    number: int
    active: bool
    link_layer: str
    gids: tuple[Gid, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Where queue pairs of this process are made: device, port, GID, and why that one."""

    device: str
    port: int
    link_layer: str
    gid: Gid
    reason: str


def list_ports(sysfs: Path = SYSFS) -> list[Port]:
    """All ports of all devices, with their GIDs."""
    found = []
    for device in sorted(sysfs.iterdir()) if sysfs.is_dir() else []:
        for port in sorted((device / "ports").glob("*"), key=lambda path: int(path.name)):
            active = "ACTIVE" in _read(port / "state")
            layer = _read(port / "link_layer") or INFINIBAND
            found.append(Port(device.name, int(port.name), active, layer, tuple(_gids(port)) if active else ()))
    return found


def _gids(port: Path) -> Iterator[Gid]:
    empty = 0
    for index in range(len(os.listdir(port / "gids"))):
        text = _read(port / "gids" / str(index))
        raw = bytes.fromhex(text.replace(":", "")) if text else _ZERO_GID
        if raw == _ZERO_GID:
            empty += 1
            if empty == _EMPTY_PLACES_TO_GIVE_UP:
                return
            continue
        empty = 0
        yield Gid(index, raw, _read(port / "gid_attrs" / "types" / str(index)))


def choose_place(
    bind: str = "", device: str = "", port: int = 0, gid_index: int = -1, ports: list[Port] | None = None
) -> Place:
    """Choose device, port and GID.

    ``bind`` is the address that the process listens on: a port that owns it is taken. Otherwise, and for loopback and wildcard
    addresses, the first active port is, with a RoCE v2 GID that maps an IPv4 address where it has one. ``device``, ``port``
    and ``gid_index`` narrow the choice (environment VERBFLOW_RDMA_DEVICE too). UnavailableError says why there is none.
    """
    device = device or os.environ.get("VERBFLOW_RDMA_DEVICE", "")
    known = list_ports() if ports is None else ports
    if not known:
        raise UnavailableError(NO_DEVICE_HINT)
    wanted = [item for item in known if device in ("", item.device) and port in (0, item.number)]
    if not wanted:
        names = ", ".join(f"{item.device}/{item.number}" for item in known)
        raise UnavailableError(
            f"there is no RDMA device {device or '(any)'} with port {port or '(any)'}; there are {names}"
        )
    active = [item for item in wanted if item.active]
    if not active:
        names = ", ".join(f"{item.device}/{item.number}" for item in wanted)
        raise UnavailableError(
            f"no active RDMA port ({names} are down); bring the interface below up: ip link set DEV up"
        )
    if gid_index >= 0:
        for item in active:
            for gid in item.gids:
                if gid.index == gid_index:
                    return _place(item, gid, f"GID index {gid_index} was asked for")
        raise UnavailableError(f"no active port has a GID at index {gid_index}")
    address = _address(bind)
    for item in active:
        for gid in item.gids:
            if address is not None and gid.address == address and _usable(item, gid):
                return _place(item, gid, f"it owns {address}")
    candidates = [(item, gid) for item in active for gid in item.gids if _usable(item, gid)]
    if not candidates:
        names = ", ".join(f"{item.device}/{item.number}" for item in active)
        raise UnavailableError(
            f"no port of {names} has a RoCE v2 GID; give its interface an IPv4 address (ip addr add ...)"
        )
    item, gid = min(candidates, key=lambda pair: _preference(*pair))
    return _place(item, gid, "it is the first active one")


def _place(port: Port, gid: Gid, why: str) -> Place:
    reason = f"{port.device} port {port.number}, GID {gid.index} ({gid.address}): {why}"
    return Place(port.device, port.number, port.link_layer, gid, reason)


def _usable(port: Port, gid: Gid) -> bool:
    return port.link_layer == INFINIBAND or gid.kind == ROCE_V2


def _preference(port: Port, gid: Gid) -> int:
    if port.link_layer == INFINIBAND or gid.raw.startswith(_MAPPED_PREFIX):
        return 0
    return 2 if ipaddress.IPv6Address(gid.raw).is_link_local else 1


def _address(bind: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(bind)
        if not (address.is_loopback or address.is_unspecified):
            return address
    return None


def check_locked_memory(nbytes: int) -> None:
    """Raise UnavailableError, with the command that helps, if this process may not lock ``nbytes`` (registration does).

    The limit does not bind a process with CAP_IPC_LOCK, as root has.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit in (-1, resource.RLIM_INFINITY) or limit >= nbytes or _has_capability(_CAP_IPC_LOCK):
        return
    raise UnavailableError(
        f"RDMA locks memory and this process may lock {limit >> 10} KiB of the {nbytes >> 10} KiB it needs; run: "
        f"ulimit -l unlimited (first: echo '* - memlock unlimited' | sudo tee /etc/security/limits.d/rdma.conf, and log in "
        f"again; for a container: --ulimit memlock=-1)"
    )


def why_unavailable() -> str | None:
    """None if RDMA can be used here, else the reason. Looks at files only; the library is the caller's to load."""
    try:
        place = choose_place()
        check_locked_memory(_ENOUGH_LOCKED_BYTES)
    except (UnavailableError, ConfigError) as error:
        return str(error)
    nodes = [node for node in Path("/dev/infiniband").glob("uverbs*") if os.access(node, os.R_OK | os.W_OK)]
    if not nodes:
        return f"{place.device} is there, but no /dev/infiniband/uverbs* that this user may open (container: --device)"
    return None


def _has_capability(number: int) -> bool:
    for line in _read(Path("/proc/self/status")).splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> number & 1)
    return False


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
