"""Guest: one boot of a virtual machine with a soft-RoCE device, which runs one command.

virtme-ng boots the distribution's kernel in QEMU over this machine's own file system, read-only, so the guest runs the same
programs from the same checkout and leaves nothing behind but the folders named in ``writable``.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from harness.launch.kernel import Kernel
from runtime.errors import VerbflowError
from runtime.transport.base import Fidelity

CHECKOUT = Path(__file__).resolve().parents[2]
GUEST_SCRIPT = Path(__file__).with_name("guest.sh")
DEFAULT_TIMEOUT_S = 3600.0
# A guest under emulation takes 15-20 s to boot on an idle machine; on a loaded one several times that.
_BOOT_GRACE_S = 60.0
OUTPUT_TAIL_BYTES = 1 << 16
_SUBNET = "10.77.0"
# Of the caller's environment only this reaches the guest.
_INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "TERM", "VIRTUAL_ENV")
_INHERITED_PREFIXES = ("VERBFLOW_", "OMP_", "OPENBLAS_", "PYTEST_")


class GuestError(VerbflowError):
    """A guest could not be set up, died, or ran out of time; the message has the last words of its console."""


class Outcome(NamedTuple):
    """How a command ended: its exit code, the tail of its output (stdout and stderr in one), seconds with the boot."""

    returncode: int
    output: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Choice:
    """Where RDMA programs run on this machine: on the host itself, or in a guest under KVM or emulation."""

    where: str  # "host" or "guest"
    fidelity: Fidelity
    reason: str
    kernel: Kernel | None = None
    accelerator: str = ""  # "kvm" or "tcg"

    def __str__(self) -> str:
        return f"{self.where} ({self.fidelity}): {self.reason}"


class Guest:
    """One boot that runs one command. Start it, wait for it, close it; or use it as a context manager.

    ``writable`` are host folders that the command may write to, at their own places; everything else that it writes
    vanishes. ``user`` runs the command as that user instead of root, with locked memory unlimited. With ``wire`` (path of a
    unix socket, shared by two guests) the RDMA device sits on a virtual cable between nodes 0 and 1, else on a dummy
    interface. The command sees VERBFLOW_FIDELITY, VERBFLOW_ADDRESS, VERBFLOW_INTERFACE and VERBFLOW_NODE. Not
    thread-safe.
    """

    def __init__(
        self,
        choice: Choice,
        command: Sequence[str],
        *,
        cwd: Path | None = None,
        writable: Sequence[Path] = (),
        environment: Mapping[str, str] | None = None,
        user: str = "",
        cpus: int = 2,
        memory_mib: int | None = None,
        timeout: float = DEFAULT_TIMEOUT_S,
        node: int = 0,
        wire: Path | None = None,
        interactive: bool = False,
    ) -> None:
        assert choice.kernel is not None, "a choice of the host needs no guest"
        self.choice = choice
        self.kernel = choice.kernel
        self.command = list(command)
        self.cwd = (cwd or Path.cwd()).resolve()
        self.writable = [Path(path).resolve() for path in writable]
        self.environment = dict(environment or {})
        self.user = user
        self.cpus = cpus
        self.memory_mib = memory_mib or _default_memory_mib()
        self.timeout = timeout
        self.node = node
        self.wire = wire
        self.interactive = interactive
        self._exchange: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0

    def start(self) -> Guest:
        """Begin to boot; returns at once."""
        for path in self.writable:
            path.mkdir(parents=True, exist_ok=True)
        self._exchange = plain_directory()
        self._write_exchange(self._exchange)
        self._started = time.monotonic()
        stream = None if self.interactive else subprocess.PIPE
        # A session of its own, so that one signal reaches vng, its shell and QEMU; not where the terminal is the guest's.
        self._process = subprocess.Popen(
            self.vng_command(self._exchange),
            cwd="/",
            stdin=None if self.interactive else subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            start_new_session=not self.interactive,
            env=dict(os.environ, PATH=os.pathsep.join([str(_plain_tools(self._exchange)), search_path()])),
        )
        return self

    def wait(self, echo: Callable[[bytes], object] | None = None) -> Outcome:
        """Wait for the end; ``echo`` gets output as it comes. GuestError if the guest died or the time was up."""
        assert self._process is not None and self._exchange is not None, "start the guest first"
        output, console = bytearray(), bytearray()
        if self.interactive:
            self._process.wait()
        else:
            self._pump(self._process, output, console, echo)
        seconds = time.monotonic() - self._started
        code, failed = read_text(self._exchange / "rc"), read_text(self._exchange / "failed")
        if code:
            return Outcome(int(code), output.decode(errors="replace"), seconds)
        if failed:
            raise GuestError(f"the soft-RoCE guest could not be set up: {failed.strip()}")
        words = last_words((console + output).decode(errors="replace"))
        raise GuestError(
            f"the soft-RoCE guest died after {seconds:.0f} s before its command ended "
            f"(kernel panic, out of memory, or QEMU did not start); its console's last lines:\n{words}"
        )

    def kill(self) -> None:
        """End the guest at once; ``wait`` says then that it died. Any thread may call it."""
        process = self._process
        if process is not None and not self.interactive:
            _kill_group(process)

    def close(self) -> None:
        """End the guest if it runs and remove what it needed. Idempotent."""
        self.kill()
        process, self._process = self._process, None
        if process is not None:
            process.wait()
            for stream in (process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        if self._exchange is not None:
            shutil.rmtree(self._exchange, ignore_errors=True)
            self._exchange = None

    def __enter__(self) -> Guest:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def vng_command(self, exchange: Path) -> list[str]:
        """The virtme-ng command line; pure."""
        arguments = [
            "vng", "-r", str(self.kernel.image), "--force-9p", "--cpus", str(self.cpus),
            "--memory", f"{self.memory_mib}M", "--user", "root", f"--rwdir={exchange}",
        ]  # fmt: skip
        # Plain names, because neither vng nor the kernel's command line takes a path with spaces; guest.sh moves them.
        for index in range(len(self.writable)):
            arguments.append(f"--rwdir=/run/verbflow/writable{index}={exchange}/writable{index}")
        options = []
        if self.choice.accelerator == "tcg":
            # Without these the guest copies with `rep movsb` and checksums with pclmulqdq, which emulation runs byte by
            # byte: half the bandwidth. The module is left out instead of the CPU flag, whose absence fails a self-test.
            arguments += ["--disable-kvm", "--append", "module_blacklist=crc32_pclmul"]
            options.append("-cpu max,-erms")
        if self.wire is not None:
            server = "on" if self.node == 0 else "off"
            options.append(
                f"-netdev stream,id=wire,server={server},addr.type=unix,addr.path={self.wire} "
                f"-device virtio-net-pci,netdev=wire,host_mtu=9000,mac={self._mac()}"
            )
        if options:
            arguments.append(f"--qemu-opts={' '.join(options)}")
        if self.interactive:
            return [*arguments, "--shell", f"{exchange}/login"]
        # The console, which only has emergencies (level 0), is vng's stderr.
        script = shlex.join(["bash", str(GUEST_SCRIPT), str(exchange)])
        return [*arguments, "--verbose", "--append", "loglevel=1", "--", script]

    def _mac(self) -> str:
        return f"52:54:00:77:00:{self.node + 1:02x}"

    def _write_exchange(self, exchange: Path) -> None:
        address = f"{_SUBNET}.{self.node + 1}"
        settings = {
            "checkout": str(CHECKOUT),
            "address": address,
            "wire_mac": self._mac() if self.wire else "",
            "user": self.user,
            "interactive": str(int(self.interactive)),
            "limit_s": "0" if self.interactive else str(int(self.timeout + _BOOT_GRACE_S)),
        }
        lines = [f"{name}={shlex.quote(value)}" for name, value in settings.items()]
        lines.append(f"writable=({shlex.join(map(str, self.writable))})")
        (exchange / "settings").write_text("\n".join(lines) + "\n")
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name in _INHERITED or name.startswith(_INHERITED_PREFIXES)
        }
        variables = inherited | {
            "VERBFLOW_FIDELITY": str(self.choice.fidelity),
            "VERBFLOW_ADDRESS": address,
            "VERBFLOW_NODE": str(self.node),
        }
        exports = [f"export {name}={shlex.quote(value)}" for name, value in (variables | self.environment).items()]
        job = [*exports, f"cd {shlex.quote(str(self.cwd))} || exit 125", f"exec {shlex.join(self.command)}"]
        (exchange / "job").write_text("\n".join(job) + "\n")
        for index, path in enumerate(self.writable):
            (exchange / f"writable{index}").symlink_to(path)
        login = exchange / "login"
        login.write_text(f"#!/bin/bash\nexec {shlex.join(['bash', str(GUEST_SCRIPT), str(exchange)])}\n")
        login.chmod(0o755)

    def _pump(
        self,
        process: subprocess.Popen[bytes],
        output: bytearray,
        console: bytearray,
        echo: Callable[[bytes], object] | None,
    ) -> None:
        """Copy output until both streams end. Pipes, not files: QEMU loses lines when its stdout is a regular file."""
        assert process.stdout is not None and process.stderr is not None
        end = self._started + self.timeout
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ, output)
            selector.register(process.stderr, selectors.EVENT_READ, console)
            while selector.get_map():
                ready = selector.select(max(0.0, end - time.monotonic()))
                if not ready and time.monotonic() >= end:
                    last = last_words((console + output).decode(errors="replace"))
                    raise GuestError(
                        f"the soft-RoCE guest was ended after its {self.timeout:.0f} s; last lines:\n{last}"
                    )
                for key, _ in ready:
                    piece = os.read(key.fd, 1 << 16)
                    if not piece:
                        selector.unregister(key.fileobj)
                        continue
                    key.data.extend(piece)
                    del key.data[:-OUTPUT_TAIL_BYTES]
                    if echo is not None and key.data is output:
                        echo(piece)
        process.wait()


def last_words(console: str, count: int = 12) -> str:
    """The last lines of a guest's console, without terminal codes; from the kernel's panic on where there was one."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\x1bc|\r", "", console)
    lines = [line for line in plain.splitlines() if line.strip()]
    for at, line in enumerate(lines):
        if "Kernel panic" in line:
            return "\n".join(lines[at : at + count])
    return "\n".join(lines[-count:])


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill vng, its shell and QEMU, and see them gone: QEMU has the writable folders open."""
    end = time.monotonic() + 2
    with contextlib.suppress(ProcessLookupError, PermissionError):
        while time.monotonic() < end:
            os.killpg(process.pid, signal.SIGKILL)
            process.poll()
            time.sleep(0.01)


def plain_directory() -> Path:
    """A private folder whose path has no character that vng, QEMU's options or the kernel's command line would split."""
    base = tempfile.gettempdir()
    plain = base if all(character.isalnum() or character in "/._-" for character in base) else "/tmp"
    return Path(tempfile.mkdtemp(prefix="verbflow-guest-", dir=plain))


def _plain_tools(directory: Path) -> Path:
    """virtme-ng's two programs under a path without spaces: it names its own folder on the kernel's command line, which a
    virtual environment in "my projects" would split. Python keeps the name by which its environment was entered."""
    environment, tools = directory / "environment", directory / "tools"
    environment.symlink_to(Path(sys.executable).parent.parent)
    tools.mkdir()
    for name, module in (("vng", "virtme_ng.run"), ("virtme-run", "virtme.commands.run")):
        tool = tools / name
        tool.write_text(
            f"#!/bin/sh\nexec {environment}/bin/python -c 'import sys; from {module} import main; sys.exit(main())' \"$@\"\n"
        )
        tool.chmod(0o755)
    return tools


def _default_memory_mib() -> int:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
    return max(1024, min(4096, total // 2))


def search_path() -> str:
    # vng is installed beside the interpreter, and depmod in sbin, which an ordinary user's PATH may lack.
    return os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def read_text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
