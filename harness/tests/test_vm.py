"""Guest launcher: its decisions natively, and (marker guest) real boots."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from harness.launch import kernel as kernels
from harness.launch import vm
from harness.launch.kernel import Kernel, find_kernel, probe_kvm, releases_with_rxe, unpack_image
from runtime.errors import UnavailableError
from runtime.transport.base import Fidelity
from runtime.transport.verbs.fidelity import fidelity_of

EMULATED = vm.Choice(
    "guest", Fidelity.SOFT_ROCE_EMULATED, "for a test", Kernel("6.1.0-9-amd64", Path("/k/image")), "tcg"
)


def make_modules(root: Path, release: str, suffix: str = ".ko") -> None:
    folder = root / release / "kernel/drivers/infiniband/sw/rxe"
    folder.mkdir(parents=True)
    (folder / f"rdma_rxe{suffix}").touch()


def test_the_newest_kernel_with_rxe_is_found_by_version_not_by_spelling(tmp_path: Path) -> None:
    make_modules(tmp_path, "6.1.0-9-amd64")
    make_modules(tmp_path, "6.1.0-57-amd64")
    make_modules(tmp_path, "6.12.3-amd64", ".ko.xz")
    make_modules(tmp_path, "6.8.0-40-generic", ".ko.zst")
    (tmp_path / "6.14.0-cloud-amd64/kernel").mkdir(parents=True)
    assert releases_with_rxe(tmp_path) == ["6.12.3-amd64", "6.8.0-40-generic", "6.1.0-57-amd64", "6.1.0-9-amd64"]


def test_a_machine_without_such_a_kernel_is_told_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=r"rdma_rxe.*apt-get install"):
        find_kernel(tmp_path, tmp_path)


def test_an_image_beside_its_modules_is_found_too(tmp_path: Path) -> None:
    make_modules(tmp_path, "6.12.1-1")
    (tmp_path / "6.12.1-1/vmlinuz").touch()
    assert find_kernel(tmp_path / "boot", tmp_path) == Kernel("6.12.1-1", tmp_path / "6.12.1-1/vmlinuz")


def test_an_unreadable_image_comes_out_of_its_package_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    calls = []

    def fake_run(command: list[str], *, cwd: str, **_: object) -> None:
        calls.append(command[0])
        if command[0] == "apt-get":
            Path(cwd, "linux-image.deb").touch()
        else:
            Path(cwd, "tree/boot").mkdir(parents=True)
            Path(cwd, "tree/boot/vmlinuz-6.1.0-9-amd64").write_bytes(b"image")

    monkeypatch.setattr(kernels.subprocess, "run", fake_run)
    image = unpack_image("6.1.0-9-amd64")
    assert image.read_bytes() == b"image"
    assert unpack_image("6.1.0-9-amd64") == image
    assert calls == ["apt-get", "dpkg-deb"]


def test_a_failed_download_says_how_to_make_the_image_readable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def fake_run(command: list[str], **_: object) -> None:
        raise subprocess.CalledProcessError(100, command, stderr="E: no network\n")

    monkeypatch.setattr(kernels.subprocess, "run", fake_run)
    with pytest.raises(UnavailableError, match=r"sudo chmod \+r /boot/vmlinuz-6.1.0.*no network"):
        unpack_image("6.1.0")


def test_kvm_without_its_device_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels.os, "access", lambda path, mode: path != "/dev/kvm")
    assert "/dev/kvm" in str(probe_kvm(EMULATED.kernel))  # type: ignore[arg-type]


def test_an_active_device_of_the_host_needs_no_guest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VERBFLOW_FIDELITY", raising=False)
    for device, state in (("mlx5_0", "1: DOWN"), ("mlx5_1", "4: ACTIVE")):
        port = tmp_path / device / "ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text(state)
    choice = vm.choose(sysfs=tmp_path)
    assert (choice.where, choice.fidelity) == ("host", Fidelity.HARDWARE)
    assert "mlx5_1" in str(choice) and "mlx5_0" not in str(choice)


def test_a_missing_tool_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vm, "_tool", lambda name: None if name.startswith("qemu") else name)
    with pytest.raises(UnavailableError, match=r"qemu-system-x86_64.*make setup"):
        vm.choose(sysfs=tmp_path)


@pytest.mark.parametrize(
    ("variable", "parent", "model", "expected"),
    [
        ("soft-roce-emulated", True, "AMD", Fidelity.SOFT_ROCE_EMULATED),
        ("nonsense", True, "AMD", Fidelity.SOFT_ROCE),
        ("", True, "model name : QEMU TCG CPU version 2.5+", Fidelity.SOFT_ROCE_EMULATED),
        ("", False, "QEMU TCG", Fidelity.HARDWARE),
    ],
)
def test_fidelity(
    variable: str, parent: bool, model: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERBFLOW_FIDELITY", variable)
    (tmp_path / "rxe0").mkdir()
    if parent:
        (tmp_path / "rxe0/parent").write_text("dummy0\n")
    (tmp_path / "cpuinfo").write_text(model)
    assert fidelity_of("rxe0", tmp_path, tmp_path / "cpuinfo") == expected


def test_the_guest_never_gets_the_host_writable(tmp_path: Path) -> None:
    guest = vm.Guest(EMULATED, ["true"], writable=[tmp_path / "with space"], wire=Path("/x/wire"), node=1)
    command = guest.vng_command(Path("/x"))
    assert "--rw" not in command
    assert [item for item in command if item.startswith("--rwdir")] == [
        "--rwdir=/x", "--rwdir=/run/verbflow/writable0=/x/writable0",
    ]  # fmt: skip
    assert any("addr.path=/x/wire" in item and "-cpu max,-erms" in item for item in command)


def test_last_words_begin_with_the_panic() -> None:
    console = "\x1b[1mboot\r\nfine\n[ 3.1] Kernel panic - not syncing: oops\n[ 3.2] trace\n"
    assert vm.last_words(console) == "[ 3.1] Kernel panic - not syncing: oops\n[ 3.2] trace"
    assert vm.last_words("a\nb\nc\n", 2) == "b\nc"


def test_a_command_on_the_host_keeps_output_and_exit_code() -> None:
    here = vm.Choice("host", Fidelity.HARDWARE, "for a test")
    pieces: list[bytes] = []
    script = "import os, sys; print(os.environ['VERBFLOW_FIDELITY']); sys.exit(7)"
    outcome = vm.run([sys.executable, "-c", script], choice=here, echo=pieces.append)
    assert (outcome.returncode, outcome.output) == (7, "hardware\n")
    assert b"".join(pieces) == b"hardware\n"


@pytest.fixture(scope="module")
def bootable() -> vm.Choice:
    try:
        return vm.choose("tcg")
    except UnavailableError as error:
        pytest.skip(str(error))


@pytest.mark.guest
@pytest.mark.slow
def test_the_probe_recognises_a_kernel_that_boots(bootable: vm.Choice) -> None:
    assert bootable.kernel is not None
    assert probe_kvm(bootable.kernel, seconds=60, accelerator="tcg") is None


@pytest.mark.guest
@pytest.mark.slow
def test_a_guest_returns_output_files_and_exit_code(bootable: vm.Choice, tmp_path: Path) -> None:
    folder = tmp_path / "a, folder with space"
    script = f"""
        test -e /sys/class/infiniband/rxe0 && test "$(ulimit -l)" = unlimited || exit 3
        touch "{vm.CHECKOUT}/written-by-guest" || exit 4
        echo content > "{folder}/file"; echo 'out put'; echo error >&2; exit 7"""
    outcome = vm.run(["bash", "-c", script], choice=bootable, writable=[folder], timeout=280)
    assert outcome.returncode == 7, outcome.output
    assert outcome.output.splitlines() == ["out put", "error"]
    assert (folder / "file").read_text() == "content\n"
    assert not (vm.CHECKOUT / "written-by-guest").exists()


@pytest.mark.guest
@pytest.mark.slow
def test_a_panic_is_an_error_with_its_text(bootable: vm.Choice) -> None:
    with pytest.raises(vm.GuestError, match=r"(?s)died after.*panic.*sysrq"):
        vm.run(["bash", "-c", "echo c > /proc/sysrq-trigger; sleep 60"], choice=bootable, timeout=280)


@pytest.mark.guest
@pytest.mark.slow
def test_a_guest_is_ended_at_its_timeout_and_leaves_no_process(bootable: vm.Choice) -> None:
    guest = vm.Guest(bootable, ["sleep", "1000"], timeout=2)
    with guest, pytest.raises(vm.GuestError, match="ended after its 2 s"):
        exchange = str(guest._exchange)
        guest.wait()
    living = [path for path in Path("/proc").glob("[0-9]*/cmdline") if exchange in _read(path)]
    assert not living
    assert not Path(exchange).exists()


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


@pytest.mark.guest
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv is not installed")
def test_an_ordinary_user_in_the_guest(bootable: vm.Choice) -> None:
    as_nobody = ["setpriv", "--reuid=nobody", "--clear-groups", "test", "-x", "."]
    if os.geteuid() == 0 and subprocess.run(as_nobody, check=False).returncode:
        pytest.skip("this checkout lies where only root may go")
    outcome = vm.run(["bash", "-c", "id -un; ulimit -l"], choice=bootable, user="nobody", timeout=280)
    assert outcome.output.split() == ["nobody", "unlimited"]
