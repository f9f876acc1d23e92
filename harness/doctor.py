"""Doctor: what can run on this machine and what cannot, why, and the command that would change it."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from harness import environment, units
from harness.bench.peers.program import require_module
from harness.launch import vm
from harness.launch.base import known_launchers, launcher
from runtime.errors import UnavailableError, VerbflowError
from runtime.memory import memcpy
from runtime.transport.registry import known, transport_class

_PEERS = {"torch": "gloo", "tensorflow": "tensorflow", "mpi4py": "mpi4py"}
_ROCE_V2 = "RoCE v2"


@dataclass
class Check:
    """One thing looked at. ``state``: ok, warn (runs, but figures suffer), no (cannot run), info."""

    name: str
    state: str
    finding: str
    remedy: str = ""


def examine() -> list[Check]:
    """All checks; one that breaks reports that instead of ending the rest. Changes nothing."""
    checks: list[Check] = []
    for part in (_transports, _devices, _guest, _limits, _processor, _memory, _launchers, _peers, _disk):
        try:
            checks += part()
        except (OSError, VerbflowError, ValueError) as error:
            checks.append(Check(part.__name__.lstrip("_"), "warn", f"could not be examined: {error}"))
    return checks


def _transports() -> list[Check]:
    checks = []
    for name in known():
        try:
            availability = transport_class(name).probe()
        except ImportError as error:
            checks.append(Check(f"transport {name}", "no", f"its module does not load: {error}", "make setup"))
            continue
        state = "ok" if availability.ok else "no"
        finding = f"{availability.reason} ({availability.fidelity})" if availability.ok else availability.reason
        checks.append(Check(f"transport {name}", state, finding))
    return checks


def _devices() -> list[Check]:
    devices = environment.rdma_devices()
    if not devices:
        loaded = Path("/sys/module/rdma_rxe").exists()
        return [
            Check(
                "RDMA devices",
                "info",
                "none" + (", though the rxe module is loaded" if loaded else ""),
                "sudo modprobe rdma_rxe && sudo rdma link add rxe0 type rxe netdev eth0   (your interface for eth0)"
                if _has_module("rdma_rxe") or loaded
                else "the soft-RoCE guest stands in (see below)",
            )
        ]
    checks = []
    for device in devices:
        for port in device["ports"]:
            active = "ACTIVE" in port["state"]
            root = Path("/sys/class/infiniband") / device["device"] / "ports" / str(port["port"])
            gids = _gids(root)
            finding = (
                f"{device['driver']}, port {port['port']} {port['state'] or 'unknown'}, {port['link_layer']}, {port['rate']}; "
                f"GIDs: {', '.join(gids) or 'none'}"
            )
            remedy = "" if active else "bring the port up: check the cable and `ip link set IFACE up`"
            if active and port["link_layer"] == "Ethernet" and not any(_ROCE_V2 in gid for gid in gids):
                active, remedy = False, "no RoCE v2 GID: give the interface an IPv4 address"
            checks.append(Check(f"RDMA device {device['device']}", "ok" if active else "warn", finding, remedy))
    for interface in environment.describe()["interfaces"]:
        if interface["mtu"] < 4200 and interface["interface"] != "lo" and any("Ethernet" in str(d) for d in devices):
            checks.append(
                Check(
                    f"MTU of {interface['interface']}",
                    "warn",
                    f"{interface['mtu']} bytes; RoCE then uses packets of 1024 bytes",
                    f"sudo ip link set {interface['interface']} mtu 4200   (if the network allows)",
                )
            )
    return checks


def _gids(port: Path) -> list[str]:
    found = []
    for entry in sorted((port / "gids").glob("*"), key=lambda path: int(path.name)) if (port / "gids").is_dir() else []:
        gid = _read(entry)
        if gid and gid.strip("0:"):
            found.append(f"{entry.name} {_read(port / 'gid_attrs' / 'types' / entry.name) or 'unknown type'}")
    return found[:8]


def _guest() -> list[Check]:
    checks = [_kvm()]
    try:
        choice = vm.choose()
    except VerbflowError as error:
        return [*checks, Check("soft-RoCE guest", "no", str(error), "make setup   (as root it installs the packages)")]
    state = "ok" if choice.where == "host" or choice.accelerator == "kvm" else "warn"
    if choice.where == "host":
        return [*checks, Check("soft-RoCE guest", "info", f"not needed: {choice.reason}")]
    remedy = (
        ""
        if state == "ok"
        else "figures show latency and correctness only; run on a machine with KVM or an RDMA device"
    )
    return [*checks, Check("soft-RoCE guest", state, f"{choice.reason} ({choice.fidelity})", remedy)]


def _kvm() -> Check:
    if not Path("/dev/kvm").exists():
        return Check("KVM", "info", "no /dev/kvm; the guest runs under software emulation")
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return Check(
            "KVM", "warn", "/dev/kvm may not be opened by this user", "sudo usermod -aG kvm $USER, then log in anew"
        )
    return Check("KVM", "info", "/dev/kvm can be opened")


def _limits() -> list[Check]:
    memlock = environment.describe()["memlock_bytes"]
    if memlock < 0:
        return [Check("locked memory", "ok", "unlimited")]
    root = os.geteuid() == 0
    return [
        Check(
            "locked memory",
            "info" if root else "warn",
            f"{units.format_bytes(memlock)}"
            + (", but root is exempt" if root else "; an arena cannot be registered whole"),
            "" if root else "ulimit -l unlimited, or `* - memlock unlimited` in /etc/security/limits.conf",
        )
    ]


def _processor() -> list[Check]:
    about = environment.describe()
    checks = [
        Check("processor", "info", f"{about['cpu']}, {about['cpus_allowed']} of {about['cpus']} CPUs usable"),
        Check(
            "load",
            "ok" if about["load"][0] < 0.5 else "warn",
            f"{about['load'][0]:.2f} over the last minute",
            "" if about["load"][0] < 0.5 else "stop other work, or figures carry its noise",
        ),
    ]
    governor = about["governor"]
    if governor == "not exposed":
        checks.append(
            Check("CPU governor", "info", "not exposed" + (" (a virtual machine)" if about["virtual"] else ""))
        )
    else:
        fine = governor == "performance"
        checks.append(
            Check(
                "CPU governor",
                "ok" if fine else "warn",
                governor,
                "" if fine else "sudo cpupower frequency-set -g performance",
            )
        )
    pinned = [name for name in ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE") if name in os.environ]
    if pinned:
        checks.append(Check("BLAS", "info", f"{', '.join(pinned)} is set; benchmarks unset it for their processes"))
    return checks


def _memory() -> list[Check]:
    about = environment.describe()
    free = about["memory_available_bytes"]
    huge = about["huge_pages"]
    return [
        Check(
            "memory",
            "ok" if free > 4 << 30 else "warn",
            f"{units.format_bytes(round(free, -8))} available",
            "" if free > 4 << 30 else "full-size AlexNet needs about 4 GB",
        ),
        _huge_pages("huge pages", "enabled", "madvise", huge, ""),
        _huge_pages(
            "huge pages of shared memory",
            "shmem_enabled",
            "advise",
            about["huge_pages_shared"],
            "; copies of many MiB between processes take up to twice as long in small pages",
        ),
        _memcpy(about["memcpy_past_caches_from_bytes"], about["cache_bytes"]),
    ]


def _memcpy(start: int | None, cache: int | None) -> Check:
    """Does memcpy take the caches for larger than they are?"""
    name = "memcpy past the caches"
    if start is None or cache is None:
        silent = "C library does not say from which length on" if start is None else "kernel shows no third-level cache"
        return Check(name, "info", f"the {silent}")
    found = f"from {units.format_bytes(start)}; the last cache has {units.format_bytes(cache)}"
    if start <= cache:
        return Check(name, "ok", found)
    correction = memcpy.environment()
    if not correction:
        return Check(
            name, "warn", f"{found}; copies between the two take up to twice as long", f"{memcpy.VARIABLE} chose it"
        )
    exports = " ".join(f"{variable}={value}" for variable, value in correction.items())
    return Check(
        name, "info", f"{found}; ranks that we start on this host have it corrected", f"elsewhere: export {exports}"
    )


def _huge_pages(name: str, setting: str, wanted: str, found: str, cost: str) -> Check:
    """A setting of transparent huge pages (the kernel's Documentation/admin-guide/mm/transhuge.rst)."""
    good = found in ("always", "within_size", wanted, "force", "not exposed")
    return Check(
        name,
        "ok" if good else "warn",
        f"transparent huge pages: {found}{'' if good else cost}",
        "" if good else f"echo {wanted} | sudo tee /sys/kernel/mm/transparent_hugepage/{setting}",
    )


def _launchers() -> list[Check]:
    checks = []
    for name in known_launchers():
        reason = launcher(name).available()
        checks.append(Check(f"launcher {name}", "info" if reason else "ok", reason or "can be used"))
    return checks


def _peers() -> list[Check]:
    checks = []
    for module, peer in _PEERS.items():
        try:
            require_module(module, module)
        except UnavailableError:
            checks.append(Check(f"peer {peer}", "info", "not installed (optional)", "make peers"))
        else:
            checks.append(Check(f"peer {peer}", "ok", "installed"))
    found = shutil.which("ib_write_lat")
    checks.append(
        Check(
            "peer perftest",
            "ok" if found else "info",
            "installed" if found else "not installed (optional)",
            "" if found else "sudo apt-get install -y perftest",
        )
    )
    return checks


def _disk() -> list[Check]:
    from harness.store import results_root

    root = results_root()
    root = root if root.exists() else root.parent
    free = shutil.disk_usage(root).free
    return [
        Check(
            "disk for results",
            "ok" if free > 1 << 30 else "warn",
            f"{units.format_bytes(round(free, -8))} free",
            "" if free > 1 << 30 else "make room, or name another folder in VERBFLOW_RESULTS",
        )
    ]


def _has_module(name: str) -> bool:
    modules = Path("/lib/modules") / os.uname().release
    return any(modules.rglob(f"{name}.ko*")) if modules.is_dir() else False


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
