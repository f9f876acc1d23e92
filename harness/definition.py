"""Definition: an experiment as a TOML file says it, checked, with messages that name file, key and allowed values.

title = "..."                    what the reader sees
rounds = 5                       every cell in so many fresh processes
[[sweep]]                        one benchmark over axes
name = "latency"
bench = "transfer"
[sweep.axes]
transport = ["grpc", "shm"]
nbytes = "4KiB..256MiB *4"
[[conclude]]                     which against which
sweep = "latency"
baseline = { transport = "grpc" }
contender = { transport = "shm" }
[profile.quick]                  what is different in a profile
rounds = 2
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from typing_extensions import Annotated  # noqa: UP035  pydantic asks for this one before 3.12

from harness import units
from harness.bench.base import Benchmark, benchmark, known_benchmarks, parameters_of
from harness.cell import ROOT, Cell, Measure
from harness.errors import DefinitionError
from harness.sweep import axis_values, combinations
from runtime.errors import ConfigError

EXPERIMENTS = ROOT / "experiments"
Duration = Annotated[int, BeforeValidator(units.parse_duration)]


class Table(BaseModel):
    """A TOML table: unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class MeasureTable(Table):
    """Any part of how long a cell is measured; see ``harness.cell.Measure``."""

    min_time: Duration | None = None
    warmup_time: Duration | None = None
    min_iterations: int | None = Field(default=None, ge=1)
    max_iterations: int | None = Field(default=None, ge=1)
    traced_iterations: int | None = Field(default=None, ge=0)
    timeout: Duration | None = None

    def over(self, base: Measure) -> Measure:
        """``base`` with what this table says."""
        pairs = {"min_time": "min_time_ns", "warmup_time": "warmup_time_ns", "timeout": "timeout_ns"}
        changes = {pairs.get(name, name): value for name, value in self.model_dump(exclude_none=True).items()}
        merged = Measure(**{**{name: getattr(base, name) for name in Measure.__slots__}, **changes})
        if merged.max_iterations < merged.min_iterations:
            raise DefinitionError(
                f"measure: max_iterations {merged.max_iterations} is below min_iterations {merged.min_iterations}"
            )
        return merged


class SweepTable(Table):
    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    bench: str
    axes: dict[str, Any] = Field(default_factory=dict)
    exclude: list[dict[str, Any]] = Field(default_factory=list)
    measure: MeasureTable = MeasureTable()


class LauncherTable(Table):
    model_config = ConfigDict(extra="allow", frozen=True)
    name: str = "local"


class ConclusionTable(Table):
    """Compare the cells of ``contender`` with those of ``baseline`` that agree in everything else."""

    sweep: str
    baseline: dict[str, Any]
    contender: dict[str, Any]
    about: Literal["latency", "bandwidth", "message-cost", "training", "overhead"] = "latency"
    where: dict[str, Any] = Field(default_factory=dict)
    margin: float = Field(default=0.03, gt=0, lt=1)
    mixed: bool = False


class ExpectationTable(Table):
    """A band in which the ratio of times (contender's over baseline's) must lie; for CI, where the reason is known."""

    sweep: str
    baseline: dict[str, Any]
    contender: dict[str, Any]
    about: Literal["latency", "bandwidth", "message-cost", "training", "overhead"] = "latency"
    where: dict[str, Any] = Field(default_factory=dict)
    ratio: tuple[float, float]
    mixed: bool = False
    because: str


class ProfileTable(Table):
    place: Literal["here", "guest"] = "here"
    rounds: int | None = Field(default=None, ge=1, le=1000)
    budget: Duration | None = None
    measure: MeasureTable = MeasureTable()
    axes: dict[str, dict[str, Any]] = Field(default_factory=dict)
    sweep_measure: dict[str, MeasureTable] = Field(default_factory=dict)
    leave_out: list[str] = Field(default_factory=list)
    launcher: LauncherTable | None = None


class Definition(Table):
    title: str
    question: str = ""
    needs_rdma: bool = False
    rounds: int = Field(default=5, ge=1, le=1000)
    seed: int = Field(default=1, ge=0)
    budget: Duration = 0
    measure: MeasureTable = MeasureTable()
    launcher: LauncherTable = LauncherTable()
    sweep: list[SweepTable] = Field(min_length=1)
    conclude: list[ConclusionTable] = Field(default_factory=list)
    expect: list[ExpectationTable] = Field(default_factory=list)
    profile: dict[str, ProfileTable] = Field(default_factory=dict)


class Experiment:
    """A definition under its name, with a profile and command-line settings applied."""

    def __init__(self, name: str, path: Path, definition: Definition, profile: str = "full") -> None:
        self.name = name
        self.path = path
        self.definition = definition
        self.profile = profile
        if profile == "full" and "full" not in definition.profile:
            self._changes = ProfileTable()
        elif profile in definition.profile:
            self._changes = definition.profile[profile]
        else:
            raise DefinitionError(
                f"{path}: no profile is called {profile!r}; known: {', '.join(dict.fromkeys(['full', *definition.profile]))}"
            )

    @property
    def place(self) -> str:
        """``here`` or ``guest``."""
        return self._changes.place

    @property
    def rounds(self) -> int:
        return self._changes.rounds or self.definition.rounds

    @property
    def budget_ns(self) -> int:
        return self.definition.budget if self._changes.budget is None else self._changes.budget

    @property
    def launcher(self) -> tuple[str, dict[str, Any]]:
        """Name and options."""
        table = self._changes.launcher or self.definition.launcher
        return table.name, dict(table.model_extra or {})

    def cells(self, settings: Mapping[str, Any] | None = None) -> list[Cell]:
        """Every cell once. ``settings`` (axis -> value, list or range text) replace axes in every sweep that has that
        parameter; DefinitionError lists everything that is wrong, not the first only."""
        errors: list[str] = []
        cells: list[Cell] = []
        used: set[str] = set()
        for index, sweep in enumerate(self.definition.sweep):
            if sweep.name in self._changes.leave_out:
                continue
            where = f"{self.path}: sweep[{index}] ({sweep.name})"
            try:
                bench = benchmark(sweep.bench)
            except ConfigError:
                errors.append(
                    f"{where}.bench: {sweep.bench!r} is not allowed; allowed: {', '.join(known_benchmarks())}"
                )
                continue
            axes = {**sweep.axes, **self._changes.axes.get(sweep.name, {})}
            for name, value in (settings or {}).items():
                if name in parameters_of(bench):
                    axes[name] = value
                    used.add(name)
            values = _parse_axes(bench, axes, f"{where}.axes", errors)
            excludes = [
                _parse_axes(bench, exclude, f"{where}.exclude[{at}]", errors)
                for at, exclude in enumerate(sweep.exclude)
            ]
            for name, item in parameters_of(bench).items():
                values.setdefault(name, [item.default])
            measure = Measure()
            try:
                for table in (
                    self.definition.measure,
                    sweep.measure,
                    self._changes.measure,
                    self._changes.sweep_measure.get(sweep.name, MeasureTable()),
                ):
                    measure = table.over(measure)
            except DefinitionError as error:
                errors.append(f"{where}.{error}")
            ordered = {name: values[name] for name in parameters_of(bench) if name in values}
            cells += [Cell(sweep.name, sweep.bench, params, measure) for params in combinations(ordered, excludes)]
        for name in set(settings or {}) - used:
            errors.append(
                f"--set {name}: no sweep of {self.name} has such an axis; known: {', '.join(self.axis_names())}"
            )
        for name in [*self._changes.axes, *self._changes.leave_out, *self._changes.sweep_measure]:
            if name not in {sweep.name for sweep in self.definition.sweep}:
                errors.append(f"{self.path}: profile.{self.profile}: no sweep is called {name!r}")
        for at, conclusion in enumerate(self.definition.conclude):
            if conclusion.sweep not in {sweep.name for sweep in self.definition.sweep}:
                errors.append(f"{self.path}: conclude[{at}].sweep: no sweep is called {conclusion.sweep!r}")
        if errors:
            raise DefinitionError("\n".join(errors))
        if not cells:
            raise DefinitionError(f"{self.path}: the axes less the excludes leave no cell to measure")
        unique: dict[str, Cell] = {}
        for cell in cells:
            unique.setdefault(cell.key(cell.sweep), cell)
        return list(unique.values())

    def axis_names(self) -> list[str]:
        """Every parameter of every benchmark that the experiment uses."""
        names: dict[str, None] = {}
        for sweep in self.definition.sweep:
            if sweep.bench in known_benchmarks():
                names.update(dict.fromkeys(parameters_of(benchmark(sweep.bench))))
        return list(names)


def experiment_paths(folder: Path = EXPERIMENTS) -> dict[str, Path]:
    """Name -> file; those in a subfolder are called ``folder/name``. Other data in TOML (printed figures, claims) has no
    ``[[sweep]]`` and is not an experiment."""
    paths = [path for path in sorted(folder.rglob("*.toml")) if "[[sweep]]" in path.read_text(errors="replace")]
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in paths}


def load_experiment(name: str, profile: str = "full", folder: Path = EXPERIMENTS) -> Experiment:
    """The experiment called ``name`` (or a path to a file). DefinitionError lists the known ones and near matches."""
    known = experiment_paths(folder)
    path = Path(name) if name.endswith(".toml") else known.get(name)
    if path is None or not path.exists():
        near = difflib.get_close_matches(name, known, 3)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise DefinitionError(f"no experiment is called {name!r}; {hint}known: {', '.join(known)}")
    return Experiment(name if name in known else path.stem, path, parse_definition(path), profile)


def parse_definition(path: Path) -> Definition:
    """Read and check one file."""
    try:
        content = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DefinitionError(f"{path} is not TOML: {error}") from None
    except OSError as error:
        raise DefinitionError(f"{path} cannot be read: {error.strerror}") from None
    try:
        return Definition.model_validate(content)
    except ValidationError as error:
        raise DefinitionError("\n".join(_sentence(path, item) for item in error.errors())) from None


def _sentence(path: Path, item: Any) -> str:
    key = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in item["loc"]).lstrip(".")
    if item["type"] == "extra_forbidden":
        return f"{path}: {key}: there is no such key{_known_keys(item['loc'])}"
    if item["type"] == "literal_error":
        return f"{path}: {key}: {item['input']!r} is not allowed; allowed: {item['ctx']['expected']}"
    if item["type"] == "missing":
        return f"{path}: {key}: is missing"
    message = item["msg"].removeprefix("Value error, ")
    return f"{path}: {key}: {message} (it is {item['input']!r})"


_MODELS: dict[str, type[Table]] = {
    "sweep": SweepTable, "conclude": ConclusionTable, "expect": ExpectationTable, "profile": ProfileTable, "measure": MeasureTable,
}  # fmt: skip


def _known_keys(location: tuple[Any, ...]) -> str:
    model: type[Table] = Definition
    for part in location[:-1]:
        if isinstance(part, str):
            model = _MODELS.get(part, model)
    return f"; known: {', '.join(model.model_fields)}"


def _parse_axes(bench: Benchmark, axes: Mapping[str, Any], where: str, errors: list[str]) -> dict[str, list[Any]]:
    known = parameters_of(bench)
    parsed: dict[str, list[Any]] = {}
    for name, value in axes.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}? " if near else ""
            errors.append(f"{where}.{name}: {bench.name} has no such parameter; {hint}known: {', '.join(known)}")
            continue
        try:
            parsed[name] = axis_values(value, lambda item, name=name: _parse_value(item, known[name].metadata))  # type: ignore[misc]
        except (DefinitionError, ConfigError) as error:
            errors.append(f"{where}.{name}: {error}")
    return parsed


def _parse_value(value: Any, metadata: Mapping[str, Any]) -> Any:
    unit, choices = metadata["unit"], metadata["choices"]
    parsed: Any = value
    if unit == "bytes":
        parsed = units.parse_size(value)
    elif unit == "ns":
        parsed = units.parse_duration(value)
    elif unit == "count":
        if isinstance(value, bool) or not str(value).isdigit():
            raise DefinitionError(f"{value!r} is not a whole number")
        parsed = int(value)
    elif unit == "flag":
        if not isinstance(value, bool) and str(value).lower() not in ("true", "false"):
            raise DefinitionError(f"{value!r} is not true or false")
        parsed = value if isinstance(value, bool) else str(value).lower() == "true"
    elif not isinstance(value, str):
        raise DefinitionError(f"{value!r} is not a text")
    if choices is not None and parsed not in choices:
        raise DefinitionError(f"{parsed!r} is not allowed; allowed: {', '.join(map(str, choices))}")
    if isinstance(parsed, int) and not isinstance(parsed, bool):
        low, high = metadata["at_least"], metadata["at_most"]
        if parsed < low or (high is not None and parsed > high):
            raise DefinitionError(f"{value!r} is out of range; allowed: {low} to {'any' if high is None else high}")
    return parsed
