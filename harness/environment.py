"""Environment: what a run must say about the machine so that somebody else can judge its figures.

Standard library only: it is read inside the soft-RoCE guest too. Nothing here may name a person or a path.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import resource
import subprocess
from pathlib import Path
from typing import Any

from harness.cell import ROOT
from runtime.memory import memcpy

_PACKAGES = ("numpy", "grpcio", "protobuf", "pandas", "pyarrow", "ibverbs", "torch", "tensorflow-cpu", "mpi4py")
# What changes from run to run on one machine does not enter the environment's hash.
_VOLATILE = ("load", "memory_available_bytes", "memcpy_past_caches_from_bytes", "git")


def describe() -> dict[str, Any]:
    """Machine, kernel, network, RDMA devices, versions, and the settings that are known to move figures."""
    return {
        "cpu": cpu_model(),
        "cpus": os.cpu_count(),
        "cpus_allowed": len(os.sched_getaffinity(0)),
        "architecture": platform.machine(),
        "memory_bytes": _meminfo("MemTotal"),
        "memory_available_bytes": _meminfo("MemAvailable"),
        "kernel": platform.release(),
        "system": _os_release(),
        "virtual": "hypervisor" in _read("/proc/cpuinfo"),
        "governor": _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor") or "not exposed",
        "huge_pages": _chosen(_read("/sys/kernel/mm/transparent_hugepage/enabled")) or "not exposed",
        "huge_pages_shared": _chosen(_read("/sys/kernel/mm/transparent_hugepage/shmem_enabled")) or "not exposed",
        "cache_bytes": memcpy.last_cache(),
        # Of this process; where it lies beyond the cache, ranks say in their facts what they were started with.
        "memcpy_past_caches_from_bytes": memcpy.threshold(),
        "tcp_congestion": _read("/proc/sys/net/ipv4/tcp_congestion_control"),
        "memlock_bytes": _memlock(),
        "interfaces": _interfaces(),
        "rdma": rdma_devices(),
        "load": list(os.getloadavg()),
        "python": platform.python_version(),
        "packages": _versions(),
        "git": _git(),
    }


def identity(environment: dict[str, Any]) -> str:
    """Twelve hex digits over everything that stays the same from run to run."""
    stable = {name: value for name, value in environment.items() if name not in _VOLATILE}
    return hashlib.sha256(json.dumps(stable, sort_keys=True).encode()).hexdigest()[:12]


def cpu_model() -> str:
    for line in _read("/proc/cpuinfo").splitlines():
        if line.startswith(("model name", "Model")):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def rdma_devices() -> list[dict[str, Any]]:
    """Every RDMA device with its driver, and its ports' states, link layers and rates, as /sys shows them."""
    root = Path("/sys/class/infiniband")
    devices = []
    for device in sorted(root.iterdir()) if root.is_dir() else []:
        ports = [
            {
                "port": int(port.name),
                "state": _read(port / "state").partition(":")[2].strip(),
                "link_layer": _read(port / "link_layer"),
                "rate": _read(port / "rate"),
            }
            for port in sorted((device / "ports").iterdir())
        ]
        driver = device / "device" / "driver"
        name = driver.resolve().name if driver.exists() else ("rxe" if device.name.startswith("rxe") else "unknown")
        devices.append({"device": device.name, "driver": name, "firmware": _read(device / "fw_ver"), "ports": ports})
    return devices


def _interfaces() -> list[dict[str, Any]]:
    root = Path("/sys/class/net")
    found = []
    for interface in sorted(root.iterdir()) if root.is_dir() else []:
        speed = _read(interface / "speed")
        found.append(
            {
                "interface": interface.name,
                "mtu": int(_read(interface / "mtu") or 0),
                "mbit_per_s": int(speed) if speed.isdigit() else None,
            }
        )
    return found


def _versions() -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _git() -> dict[str, Any]:
    def ask(*arguments: str) -> str:
        try:
            done = subprocess.run(
                ["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=20, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    revision = ask("rev-parse", "HEAD")
    return {"revision": revision or "no git", "dirty": bool(revision and ask("status", "--porcelain", "-uno"))}


def _memlock() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return -1 if soft == resource.RLIM_INFINITY else soft


def _meminfo(name: str) -> int:
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def _os_release() -> str:
    for line in _read("/etc/os-release").splitlines():
        if line.startswith("PRETTY_NAME="):
            return line.partition("=")[2].strip('"')
    return platform.system()


def _chosen(text: str) -> str:
    return text.partition("[")[2].partition("]")[0]


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
