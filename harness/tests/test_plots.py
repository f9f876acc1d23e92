from pathlib import Path

import matplotlib
import numpy as np
import pytest

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from harness import store
from harness.analysis import compare, frames
from harness.plots import bars, breakdown, curves, figures, palette, timeline
from harness.report import build
from harness.tests.fabricated import DEFINITION, make_run


@pytest.fixture
def ax():
    figure, ax = plt.subplots()
    yield ax
    plt.close(figure)


@pytest.fixture
def results(tmp_path):
    return store.load(make_run(tmp_path))


def test_latency_curves_carry_the_medians_in_the_transports_colours(results, ax):
    cells = frames.cells(results)
    assert curves.latency_over_size(cells, ax) is ax
    lines = {line.get_label(): line for line in ax.get_lines()}
    assert set(lines) == {palette.label("grpc"), palette.label("shm")}
    grpc = lines[palette.label("grpc")]
    assert list(grpc.get_xdata()) == [8, 65536]
    assert np.allclose(grpc.get_ydata(), cells[cells["transport"] == "grpc"].sort_values("nbytes")["median_ns"] / 1e3)
    assert grpc.get_color() == palette.TRANSPORTS["grpc"]
    assert ax.get_title(loc="right") == "measured on: loopback"
    assert ax.get_xscale() == ax.get_yscale() == "log"


def test_pictures_refuse_to_mix_grounds(tmp_path, ax):
    mixed = store.load(make_run(tmp_path, fidelity=lambda name: "hardware" if name == "shm" else "loopback"))
    with pytest.raises(ValueError, match="different grounds"):
        curves.latency_over_size(frames.cells(mixed), ax)
    curves.latency_over_size(frames.cells(mixed), ax, mixed=True)
    assert "MIXED GROUNDS" in ax.get_title(loc="right")


def test_phases_stack_to_the_end_to_end_time(results, ax):
    phases = frames.breakdown(results)
    breakdown.phase_stack(phases[phases["nbytes"] == 8], ax)
    tops = max(patch.get_y() + patch.get_height() for patch in ax.patches)
    assert tops == pytest.approx(300, rel=0.05)


def test_bars_and_scaling(results, ax):
    cells = frames.cells(results).assign(workers=[1, 1, 2, 2])
    bars.rate_bars(cells, ax)
    assert ax.get_xlabel() == "workers"
    bars.scaling(cells, ax)
    assert ax.get_lines()[-1].get_label() == "ideal"


def test_speedups_show_their_intervals(results, ax):
    table = figures.comparison_frame(compare.conclude(results, DEFINITION["conclude"]))
    curves.ratio_over_size(table, ax)
    bars.speedup_bars(table, ax)
    assert ax.patches[0].get_height() == pytest.approx(10, rel=0.05)


def test_timeline_and_chrome_trace(results, ax):
    spans = results.spans[results.spans["run_id"] == results.spans["run_id"].iloc[0]]
    timeline.timeline(spans, ax)
    assert len(ax.get_yticks()) == 2
    trace = timeline.chrome_trace(spans)
    assert len(trace["traceEvents"]) == len(spans)
    assert {event["cat"] for event in trace["traceEvents"]} == {"wire", "copy"}
    with pytest.raises(ValueError, match="no spans"):
        timeline.timeline(spans.iloc[:0], ax)


def test_every_picture_and_the_report_of_a_run(tmp_path, results):
    comparisons = compare.conclude(results, DEFINITION["conclude"])
    pictures = figures.draw_all(results, comparisons, tmp_path / "pictures")
    names = {path.name for path in pictures}
    assert {
        "latency-latency.png",
        "latency-bandwidth.png",
        "latency-loopback-phases.png",
        "latency-speedup.png",
    } == names
    page = build.write(results, comparisons, pictures, "A <sentence>.", tmp_path / "report.html").read_text()
    assert "A &lt;sentence&gt;." in page
    assert page.count("data:image/png;base64,") == 4
    assert "http://" not in page
    assert "https://" not in page
    assert "<script" not in page


def test_a_run_with_failures_reports_them(tmp_path):
    results = store.load(make_run(tmp_path, failed="shm"))
    page = build.write(results, [], [], "s", tmp_path / "report.html").read_text()
    assert "it broke" in page
    assert [table["name"] for table in build.tables(results)] == ["latency"]


def test_one_colour_a_transport():
    assert len(set(palette.TRANSPORTS.values())) == len(palette.TRANSPORTS)
    assert palette.colour("carrier pigeon") == palette.colour("carrier pigeon")
    assert Path(palette.STYLE).exists()
