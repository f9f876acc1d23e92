"""Kernel: which of the distribution's kernels a guest can boot, and whether KVM can boot it here.

Needed is a kernel with ``rdma_rxe``: Debian's generic image has it and the cloud image has not; Ubuntu keeps it in
linux-modules-extra. Some distributions let only root read the images in /boot; then the same image is taken out of its
package, which anybody may download, into the user's cache.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from runtime.errors import UnavailableError

BOOT = Path("/boot")
MODULES = Path("/lib/modules")
_RXE = "kernel/drivers/infiniband/sw/rxe"
_INSTALL_HINT = "run: make setup (or: sudo apt-get install linux-image-amd64; on Ubuntu linux-image-generic)"
_BOOTED = "verbflow-kvm-probe-booted"


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel release (as ``uname -r`` would say) and its image, readable by this user."""

    release: str
    image: Path


def cache_directory() -> Path:
    """Where downloads of this user go, by the XDG base directory specification."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "verbflow"


def find_kernel(boot: Path = BOOT, modules: Path = MODULES) -> Kernel:
    """The newest kernel with rdma_rxe. UnavailableError says what to install."""
    releases = releases_with_rxe(modules)
    if not releases:
        raise UnavailableError(f"no kernel with the rdma_rxe module under {modules}; {_INSTALL_HINT}")
    for release in releases:
        for image in (boot / f"vmlinuz-{release}", modules / release / "vmlinuz"):
            if os.access(image, os.R_OK):
                return Kernel(release, image)
    return Kernel(releases[0], unpack_image(releases[0]))


def releases_with_rxe(modules: Path = MODULES) -> list[str]:
    """Releases whose modules hold rdma_rxe (plain or compressed), newest first."""
    found = [path.name for path in modules.glob("*") if any((path / _RXE).glob("rdma_rxe.ko*"))]
    return sorted(found, key=_release_order, reverse=True)


def _release_order(release: str) -> tuple[tuple[int, int, str], ...]:
    parts = re.findall(r"\d+|[a-z]+", release)
    return tuple((1, int(part), "") if part.isdigit() else (0, 0, part) for part in parts)


def unpack_image(release: str) -> Path:
    """The image of an installed release, taken out of its package into the cache; downloaded once."""
    target = cache_directory() / "kernels" / f"vmlinuz-{release}"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    package = f"linux-image-{release}"
    hint = f"/boot/vmlinuz-{release} is readable by root only; run: sudo chmod +r /boot/vmlinuz-{release}"
    with tempfile.TemporaryDirectory(prefix="verbflow-kernel-") as scratch:
        try:
            subprocess.run(
                ["apt-get", "download", package], cwd=scratch, check=True, capture_output=True, text=True, timeout=600
            )
            [archive] = Path(scratch).glob("*.deb")
            subprocess.run(
                ["dpkg-deb", "-x", archive.name, "tree"], cwd=scratch, check=True, capture_output=True, timeout=600
            )
            [image] = Path(scratch).glob(f"tree/boot/vmlinuz-{release}")
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            detail = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1:]
            raise UnavailableError(f"{hint} (getting it out of package {package} failed: {detail})") from error
        part = target.with_suffix(f".{os.getpid()}.part")
        shutil.copyfile(image, part)
        part.replace(target)
    return target


def probe_kvm(kernel: Kernel, seconds: float = 15.0, accelerator: str = "kvm") -> str | None:
    """None if KVM boots the kernel to user space within ``seconds``, else a phrase that says why not.

    Opening /dev/kvm proves little: nested virtualisation often fails only when the guest starts. So a guest with a
    four-line init is booted.
    """
    if accelerator == "kvm" and not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return "/dev/kvm is missing or not accessible"
    busybox, qemu = shutil.which("busybox"), shutil.which("qemu-system-x86_64")
    if busybox is None or qemu is None:
        return "busybox-static or qemu-system-x86 is not installed"
    script = f"#!/bin/busybox sh\n/bin/busybox echo {_BOOTED}\n/bin/busybox poweroff -f\n"
    with tempfile.TemporaryDirectory(prefix="verbflow-kvm-") as scratch:
        initramfs = Path(scratch, "initramfs")
        initramfs.write_bytes(_initramfs(Path(busybox).read_bytes(), script.encode()))
        command = [
            qemu, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-m", "512", "-serial", "stdio",
            "-accel", accelerator, "-cpu", "host" if accelerator == "kvm" else "max",
            "-kernel", str(kernel.image), "-initrd", str(initramfs), "-append", "console=ttyS0 panic=-1 quiet",
        ]  # fmt: skip
        try:
            outcome = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds)
        except subprocess.TimeoutExpired as expired:
            return None if _BOOTED.encode() in (expired.stdout or b"") else f"a test guest hung for {seconds:.0f} s"
        except OSError as error:
            return f"{qemu}: {error}"
    if _BOOTED.encode() in outcome.stdout:
        return None
    lines = outcome.stderr.decode(errors="replace").strip().splitlines()
    return f"QEMU gave up: {lines[-1]}" if lines else f"a test guest ended early (QEMU exit code {outcome.returncode})"


def _initramfs(busybox: bytes, script: bytes) -> bytes:
    """An archive in cpio's newc format (linux/Documentation/driver-api/early-userspace/buffer-format.rst)."""
    archive = bytearray()

    def add(name: str, mode: int, content: bytes = b"", device: tuple[int, int] = (0, 0)) -> None:
        encoded = name.encode() + b"\0"
        fields = (0, mode, 0, 0, 1, 0, len(content), 0, 0, *device, len(encoded), 0)
        archive.extend(b"070701" + b"".join(b"%08X" % value for value in fields) + encoded)
        for piece in (b"", content):
            archive.extend(piece)
            archive.extend(b"\0" * (-len(archive) % 4))

    add("bin", 0o040755)
    add("dev", 0o040755)
    add("dev/console", 0o020600, device=(5, 1))
    add("bin/busybox", 0o100755, busybox)
    add("init", 0o100755, script)
    add("TRAILER!!!", 0)
    return bytes(archive)
