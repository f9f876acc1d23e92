"""Checkpoints: variables and the global step in one safetensors file, written atomically and verified on load.

The format is safetensors (8-byte header length, JSON header, tensors back to back), so other tools can open it. It is written
here piece by piece as variables arrive from the parameter servers: nobody ever holds a second copy of the model.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from runtime.errors import CheckpointError
from runtime.tensor import TensorSpec, byte_view, checksum

_DTYPES = {
    "bool": "BOOL", "int8": "I8", "uint8": "U8", "int16": "I16", "uint16": "U16", "int32": "I32", "uint32": "U32",
    "int64": "I64", "uint64": "U64", "float16": "F16", "float32": "F32", "float64": "F64",
}  # fmt: skip
_DTYPES_BACK = {code: np.dtype(name) for name, code in _DTYPES.items()}
_FORMAT = "verbflow-checkpoint-1"
_NAME = re.compile(r"step-(\d{12})\.safetensors")
_MAX_HEADER_BYTES = 64 << 20


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:012d}.safetensors"


def write_checkpoint(
    path: Path, step: int, specs: Mapping[str, TensorSpec], variables: Iterable[tuple[str, np.ndarray]]
) -> None:
    """Write ``variables`` (each of ``specs`` once, in any order) to ``path``, which either appears whole or not at all.

    CheckpointError if the folder cannot be written, or a variable is missing or of another spec.
    """
    layout = _layout(specs)
    sums = dict.fromkeys(specs, 0)
    handle, temporary = -1, ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(handle, "wb") as file:
            header = _header(step, layout, sums)
            file.write(header)
            missing = set(specs)
            for name, array in variables:
                if name not in missing or TensorSpec.of(array) != specs[name]:
                    raise CheckpointError(
                        f"checkpoint {path}: variable {name} {TensorSpec.of(array)} was not expected "
                        f"({specs.get(name, 'no such variable, or twice')})"
                    )
                missing.remove(name)
                file.seek(len(header) + layout[name][1])
                file.write(byte_view(np.ascontiguousarray(array)).data)
                sums[name] = checksum(array)
            if missing:
                raise CheckpointError(f"checkpoint {path}: no content for {', '.join(sorted(missing))}")
            file.seek(0)
            file.write(_header(step, layout, sums))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        temporary = ""
        _sync_folder(path.parent)
    except OSError as error:
        raise CheckpointError(f"checkpoint {path} cannot be written: {error.strerror or error}") from error
    finally:
        if temporary:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


class Checkpoint:
    """An open checkpoint; its header is checked when opened, each tensor when read. A context manager."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        try:
            self._file: IO[bytes] = open(self.path, "rb")  # noqa: SIM115 - closed by close()
        except OSError as error:
            raise CheckpointError(f"checkpoint {path} cannot be read: {error.strerror}") from error
        try:
            self._read_header()
        except BaseException:
            self._file.close()
            raise

    def _read_header(self) -> None:
        size = os.fstat(self._file.fileno()).st_size
        head = self._file.read(8)
        length = int.from_bytes(head, "little")
        if len(head) < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise CheckpointError(f"checkpoint {self.path} is damaged: its header is cut off")
        try:
            header: dict[str, Any] = json.loads(self._file.read(length))
            metadata = header.pop("__metadata__")
            if metadata["format"] != _FORMAT:
                raise CheckpointError(f"checkpoint {self.path} has format {metadata['format']!r}, not {_FORMAT!r}")
            self.step = int(metadata["step"])
            self._sums = {name: int(value, 16) for name, value in json.loads(metadata["crc32"]).items()}
            self._entries: dict[str, tuple[TensorSpec, int, int]] = {}
            for name, entry in header.items():
                first, last = map(int, entry["data_offsets"])
                self._entries[name] = (TensorSpec(tuple(entry["shape"]), _DTYPES_BACK[entry["dtype"]]), first, last)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"checkpoint {self.path} is damaged or of another program: {error!r}") from None
        self._start = 8 + length
        end = max((stop for _, _, stop in self._entries.values()), default=0)
        bad = [name for name, (spec, first, last) in self._entries.items() if last - first != spec.nbytes or first < 0]
        if bad or set(self._sums) != set(self._entries) or self._start + end != size:
            raise CheckpointError(
                f"checkpoint {self.path} is damaged: {size} bytes where its header describes {self._start + end}"
            )

    @property
    def specs(self) -> dict[str, TensorSpec]:
        return {name: spec for name, (spec, _, _) in self._entries.items()}

    def read(self, name: str) -> np.ndarray:
        """One variable; CheckpointError if its checksum is wrong or it is not there."""
        if name not in self._entries:
            raise CheckpointError(f"checkpoint {self.path} has no variable {name!r}")
        spec, start, _ = self._entries[name]
        array = np.empty(spec.shape, spec.dtype)
        view = byte_view(array).data if spec.nbytes else memoryview(bytearray())
        self._file.seek(self._start + start)
        if self._file.readinto(view) != spec.nbytes or zlib.crc32(view) != self._sums[name]:  # type: ignore[attr-defined]
            raise CheckpointError(f"checkpoint {self.path} is damaged: variable {name} has another checksum")
        return array

    def verify(self) -> None:
        """Read everything once; CheckpointError at the first damaged variable."""
        for name in self._entries:
            self.read(name)

    def check_model(self, specs: Mapping[str, TensorSpec]) -> None:
        """CheckpointError unless the checkpoint holds exactly these variables."""
        mine = self.specs
        differing = [
            f"{name}: {mine.get(name, 'absent')} here, {specs.get(name, 'absent')} in the model"
            for name in sorted({*mine, *specs})
            if mine.get(name) != specs.get(name)
        ]
        if differing:
            more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
            raise CheckpointError(f"checkpoint {self.path} is of another model: {'; '.join(differing[:3])}{more}")

    def variables(self) -> Iterator[tuple[str, np.ndarray]]:
        """All variables, one in memory at a time."""
        for name in self._entries:
            yield name, self.read(name)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoint files, newest step first; an absent folder has none."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"checkpoint folder {folder} cannot be read: {error.strerror}") from error
    return sorted((Path(folder) / name for name in names if _NAME.fullmatch(name)), reverse=True)


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint that verifies; None if there is none at all. CheckpointError if there are some, all damaged."""
    damaged = []
    for path in list_checkpoints(folder):
        try:
            with Checkpoint(path) as checkpoint:
                checkpoint.verify()
            return path
        except CheckpointError as error:
            damaged.append(str(error))
    if damaged:
        raise CheckpointError(f"no checkpoint in {folder} is whole: {'; '.join(damaged)}")
    return None


def keep_last(folder: Path, count: int) -> None:
    """Remove all checkpoints but the newest ``count``, and what interrupted writers left."""
    for path in list_checkpoints(folder)[count:]:
        with contextlib.suppress(OSError):
            path.unlink()
    for name in os.listdir(folder):
        if name.startswith(".step-"):
            with contextlib.suppress(OSError):
                (Path(folder) / name).unlink()


def _layout(specs: Mapping[str, TensorSpec]) -> dict[str, tuple[TensorSpec, int, int]]:
    layout, offset = {}, 0
    for name in sorted(specs):
        spec = specs[name]
        if spec.dtype.name not in _DTYPES:
            raise CheckpointError(f"variable {name}: safetensors has no dtype {spec.dtype.name}")
        layout[name] = (spec, offset, offset + spec.nbytes)
        offset += spec.nbytes
    return layout


def _header(step: int, layout: Mapping[str, tuple[TensorSpec, int, int]], sums: Mapping[str, int]) -> bytes:
    """The file's head, of one length whatever the checksums are, so that it can be written again over the first one."""
    entries: dict[str, Any] = {
        "__metadata__": {
            "format": _FORMAT,
            "step": str(step),
            "crc32": json.dumps({name: f"{sums[name]:08x}" for name in layout}),
        }
    }
    for name, (spec, start, end) in layout.items():
        entries[name] = {"dtype": _DTYPES[spec.dtype.name], "shape": list(spec.shape), "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _sync_folder(folder: Path) -> None:
    # The rename itself must survive a power cut.
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
