"""Where an RDMA device is: on this machine, or in a guest; and programs run there.

python -m harness.launch.vm [--user NAME] [--writable DIR] [--timeout S] -- COMMAND...
python -m harness.launch.vm --nodes 2 -- COMMAND...     two guests joined by a virtual wire
python -m harness.launch.vm                             an interactive shell
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from harness.launch.guest import (
    CHECKOUT,
    DEFAULT_TIMEOUT_S,
    OUTPUT_TAIL_BYTES,
    Choice,
    Guest,
    GuestError,
    Outcome,
    last_words,
    plain_directory,
    read_text,
    search_path,
)
from harness.launch.kernel import find_kernel, probe_kvm
from runtime.errors import UnavailableError, VerbflowError
from runtime.transport.base import Fidelity
from runtime.transport.verbs.fidelity import fidelity_of

__all__ = [
    "CHECKOUT", "Choice", "Guest", "GuestError", "Outcome", "choose", "guest_accelerator", "last_words", "run", "run_pair",
]  # fmt: skip


def choose(accelerator: str = "auto", sysfs: Path = Path("/sys/class/infiniband")) -> Choice:
    """Pick the best way to an RDMA device. UnavailableError says what to install where there is none.

    ``accelerator``: "kvm" or "tcg" asks for a guest, also where the host has a device; "auto" probes.
    """
    if accelerator == "auto":
        active = sorted({path.parents[2].name for path in sysfs.glob("*/ports/*/state") if "ACTIVE" in read_text(path)})
        if active:
            reason = f"this machine has an active RDMA device ({', '.join(active)})"
            return Choice("host", fidelity_of(active[0], sysfs), reason)
    missing = [tool for tool in ("vng", "qemu-system-x86_64", "busybox", "depmod") if _tool(tool) is None]
    if missing:
        raise UnavailableError(f"a soft-RoCE guest needs {', '.join(missing)}, which is not installed; run: make setup")
    kernel = find_kernel()
    refusal = "not asked for" if accelerator == "tcg" else probe_kvm(kernel)
    if refusal is None:
        reason = f"no RDMA device here; KVM works, kernel {kernel.release}"
        return Choice("guest", Fidelity.SOFT_ROCE, reason, kernel, "kvm")
    if accelerator == "kvm":
        raise UnavailableError(f"KVM was asked for and does not work here: {refusal}")
    reason = f"no RDMA device here and no KVM ({refusal}); software emulation, kernel {kernel.release}"
    return Choice("guest", Fidelity.SOFT_ROCE_EMULATED, reason, kernel, "tcg")


def run(
    command: Sequence[str],
    *,
    choice: Choice | None = None,
    timeout: float = DEFAULT_TIMEOUT_S,
    echo: Callable[[bytes], object] | None = None,
    writable: Sequence[Path] = (),
    user: str = "",
    environment: Mapping[str, str] | None = None,
) -> Outcome:
    """Run a command where an RDMA device is: in a guest, or here where this machine has one."""
    choice = choice or choose()
    if choice.where == "host":
        return _run_here(command, choice, timeout, echo, environment)
    with Guest(choice, command, writable=writable, timeout=timeout, user=user, environment=environment) as guest:
        return guest.wait(echo)


def run_pair(
    command: Sequence[str],
    *,
    choice: Choice,
    timeout: float = DEFAULT_TIMEOUT_S,
    echo: Callable[[bytes], object] | None = None,
    writable: Sequence[Path] = (),
) -> list[Outcome]:
    """Run a command in two guests joined by a virtual wire; VERBFLOW_NODE (0 or 1) tells it who it is.

    Each node's output is echoed line by line behind its number. One CPU a guest: more oversubscribe a small machine, and
    then latency has tails of 100 ms.
    """
    outcomes: list[Outcome | None] = [None, None]
    failures: list[BaseException] = []
    guests: list[Guest] = []
    guard = threading.Lock()

    def follow(node: int) -> None:
        rest = bytearray()

        def lines(piece: bytes) -> None:
            rest.extend(piece)
            *whole, last = rest.split(b"\n")
            rest[:] = last
            if echo is not None:
                with guard:
                    for line in whole:
                        echo(b"%d| %s\n" % (node, line))

        try:
            outcomes[node] = guests[node].wait(lines)
        except BaseException as error:  # handed to the caller below
            error.add_note(f"node {node}")
            failures.append(error)
            for other in guests:  # which may wait for this one for ever
                other.kill()

    exchange = plain_directory()
    wire = exchange / "wire"
    try:
        with contextlib.ExitStack() as stack:
            threads = []
            for node in (0, 1):
                guest = Guest(choice, command, writable=writable, timeout=timeout, cpus=1, node=node, wire=wire)
                guests.append(stack.enter_context(guest))
                threads.append(threading.Thread(target=follow, args=(node,), name=f"guest-{node}"))
                threads[-1].start()
                # Node 1's QEMU plugs itself into the socket that node 0's makes, and does not try twice.
                while not wire.exists() and threads[0].is_alive():
                    time.sleep(0.05)
            for thread in threads:
                thread.join()
    finally:
        shutil.rmtree(exchange, ignore_errors=True)
    if failures:
        raise failures[0]
    return [outcome for outcome in outcomes if outcome is not None]


def _run_here(
    command: Sequence[str],
    choice: Choice,
    timeout: float,
    echo: Callable[[bytes], object] | None,
    environment: Mapping[str, str] | None,
) -> Outcome:
    variables = dict(os.environ, VERBFLOW_FIDELITY=str(choice.fidelity), **(environment or {}))
    started = time.monotonic()
    tail = bytearray()
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        watchdog = threading.Timer(timeout, process.kill)
        watchdog.start()
        try:
            assert process.stdout is not None
            while piece := os.read(process.stdout.fileno(), 1 << 16):
                tail.extend(piece)
                del tail[:-OUTPUT_TAIL_BYTES]
                if echo is not None:
                    echo(piece)
            code = process.wait()
        finally:
            watchdog.cancel()
    return Outcome(code if code >= 0 else 128 - code, tail.decode(errors="replace"), time.monotonic() - started)


def _tool(name: str) -> str | None:
    return shutil.which(name, path=search_path())


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code is the command's, 1 where the guest failed."""
    parser = argparse.ArgumentParser(prog="python -m harness.launch.vm", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--user", default="", help="run the command as this user (default root)")
    parser.add_argument(
        "--writable", type=Path, action="append", default=[], help="host folder the command may write to"
    )
    parser.add_argument("--timeout", type=float, default=DEFAULT_TIMEOUT_S, help="seconds, with the boot")
    parser.add_argument("--accelerator", choices=("auto", "kvm", "tcg"), default="auto")
    parser.add_argument("--nodes", type=int, choices=(1, 2), default=1, help="2: two guests joined by a virtual wire")
    parser.add_argument("--skip", action="store_true", help="exit code 0 where no guest can run, with the reason")
    parser.add_argument("command", nargs="*", help="after --; none: an interactive shell")
    options = parser.parse_args(arguments)

    def echo(piece: bytes) -> None:
        sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()

    try:
        choice = choose(
            options.accelerator if options.nodes == 1 or options.accelerator != "auto" else guest_accelerator()
        )
        print(f"verbflow: {choice}", file=sys.stderr)
        if not options.command:
            shell = os.environ.get("SHELL", "/bin/bash")
            if choice.where == "host":
                return subprocess.call([shell], env=dict(os.environ, VERBFLOW_FIDELITY=str(choice.fidelity)))
            with Guest(choice, ["bash", "-i"], user=options.user, writable=options.writable, interactive=True) as guest:
                return guest.wait().returncode
        if options.nodes == 2:
            pair = run_pair(
                options.command, choice=choice, timeout=options.timeout, echo=echo, writable=options.writable
            )
            return max(outcome.returncode for outcome in pair)
        outcome = run(
            options.command,
            choice=choice,
            timeout=options.timeout,
            echo=echo,
            writable=options.writable,
            user=options.user,
        )
    except UnavailableError as error:
        print(f"verbflow: {'skipped, ' if options.skip else ''}{error}", file=sys.stderr)
        return 0 if options.skip else 1
    except VerbflowError as error:
        print(f"verbflow: {error}", file=sys.stderr)
        return 1
    return outcome.returncode


def guest_accelerator() -> str:
    """For what only guests can do (two nodes), whatever devices the host has."""
    return "tcg" if probe_kvm(find_kernel()) else "kvm"


if __name__ == "__main__":
    sys.exit(main())
