"""The page, the pictures, the ceilings, and the machine's figures."""

from __future__ import annotations

import gc
import mmap
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specrag.bench import plots
from specrag.bench.bounds import (
    DecoderShape,
    decoder_work,
    pass_floor,
    retrieval_ceiling,
    steps_speedup,
)
from specrag.bench.load import LoadNote
from specrag.bench.machine import describe_machine, measure_rates
from specrag.bench.measurement import Measurement
from specrag.bench.memory import peak_memory
from specrag.bench.report import Page, render
from specrag.errors import InputError

PAGE = Page(title="Results: tokens", summary="All against all.", machine="a test machine")
ENTRY = Measurement(
    suite="tokens",
    task="qa",
    method="respec",
    baseline="plain",
    model="smollm2-135m",
    dtype="bf16",
    device="cpu",
    n=80,
    speedup=1.5,
    speedup_low=1.4,
    speedup_high=1.6,
    identical=0.9999,
    command="specrag bench tokens",
    version="0.1.0+gabc",
    date="2026-01-02",
    extra={"ceiling": 2.0, "peak_mib": 1234.5},
)


def cells(page: str, row: int = 0) -> dict[str, str]:
    lines = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("|")]
    return dict(zip(lines[0], lines[2 + row], strict=True))


def test_the_page_says_what_is_needed_to_believe_it() -> None:
    page = render(PAGE, [ENTRY])
    for fact in ("a test machine", "specrag bench tokens", "0.1.0+gabc", "2026-01-02", "smollm2-135m"):
        assert fact in page
    row = cells(page)
    assert row["speed-up"] == "1.50 (1.40 to 1.60)"
    assert (row["ceiling"], row["never slower"]) == ("2.00", "yes")
    assert row["identical"] == "99.9%"  # never rounded up to all
    assert row["peak, MiB"] == "1,234"
    assert "accuracy" not in row
    assert "MAT" not in row


def test_acceptance_is_shown_by_source_where_a_run_tells() -> None:
    told = replace(ENTRY, acceptance_by_source={"recycling": 0.1, "suffix": 0.625})
    assert cells(render(PAGE, [told]))["acceptance by source"] == "recycling 10.0%, suffix 62.5%"
    assert "acceptance by source" not in cells(render(PAGE, [ENTRY]))


def test_simulated_stands_in_the_cell_itself() -> None:
    row = cells(render(PAGE, [ENTRY, replace(ENTRY, simulated=True)]), row=1)
    assert row["speed-up"].endswith("(simulated)")
    assert row["ceiling"].endswith("(simulated)")
    assert row["peak, MiB"].endswith("(simulated)")
    assert "simulated" not in cells(render(PAGE, [ENTRY]))["speed-up"]


def test_a_busy_machine_and_failures_are_told() -> None:
    quiet = render(replace(PAGE, load=LoadNote(0.01, 0.02, 0, 9)), [ENTRY])
    busy = render(replace(PAGE, load=LoadNote(0.01, 0.4, 3, 9), failures=["qa | 1: MemoryError"]), [ENTRY])
    assert "1% before the run, at most 2% during it" in quiet
    assert "busy" not in quiet
    assert "**The machine was busy**: others used more than 10% in 3 of 9 timed runs" in busy
    assert "- qa \\| 1: MemoryError" in busy


def test_sections_have_tables_of_their_own() -> None:
    entries = [replace(ENTRY, task="decode/behind 100"), replace(ENTRY, task="fork/bytes", speedup_low=0.1)]
    page = render(PAGE, entries)
    assert page.index("## decode") < page.index("behind 100") < page.index("## fork")
    assert page.count("| task |") == 2


def test_an_overview_stands_before_a_long_table() -> None:
    entries = [
        replace(
            ENTRY,
            task=f"parts/{task}",
            method=method,
            speedup=speedup,
            speedup_low=1,
            speedup_high=3,
            extra={},
        )
        for method, first in (("respec", 1.5), ("prompt-lookup", 1.25))
        for task, speedup in (("qa", first), ("rag", first + 1), ("overall", first + 0.5))
    ]
    page = render(PAGE, entries)
    assert cells(page) == {"method": "respec", "overall": "2.00", "qa": "1.50", "rag": "2.50"}
    assert cells(page, row=1)["overall"] == "1.75"
    assert page.index("Speed-up over `plain`") < page.index("| task |")
    of_two_models = [*entries, replace(entries[0], model="another")]
    assert "Speed-up over" not in render(PAGE, of_two_models), "a cell holds one figure"


def test_a_slower_method_is_named_slower() -> None:
    slower = replace(ENTRY, speedup=0.9, speedup_low=0.8, speedup_high=0.95)
    assert cells(render(PAGE, [slower]))["never slower"] == "**no**"


def test_a_ratio_above_its_ceiling_is_an_error_of_measurement() -> None:
    impossible = replace(ENTRY, speedup=2.5, speedup_high=2.6)
    assert impossible.above_ceiling
    assert not ENTRY.above_ceiling
    page = render(PAGE, [ENTRY, impossible])
    row = cells(page, row=1)
    assert row["speed-up"] == "~~2.50 (1.40 to 2.60)~~ error"
    assert row["never slower"] == ""
    assert "An error of measurement" in page
    assert "rror" not in render(PAGE, [ENTRY])
    tasks = [replace(impossible, task=task) for task in ("qa", "rag", "overall")]
    assert cells(render(PAGE, tasks))["qa"] == "~~2.50~~ error"


def is_drawn(path: Path) -> bool:
    """True for a PNG with more than one colour and no clipped edge."""
    from matplotlib.image import imread

    pixels = np.asarray(imread(path))[..., :3]
    edges = [pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]]
    return len(np.unique(pixels.reshape(-1, 3), axis=0)) > 10 and all(bool((e == 1).all()) for e in edges)


def test_pictures_are_drawn_the_same_each_time(tmp_path: Path) -> None:
    entries = [
        ENTRY,
        replace(ENTRY, task="overall"),
        replace(ENTRY, method="prompt-lookup", speedup_high=9.0),
    ]
    first = plots.speedup_plot(tmp_path / "a.png", entries, title="tokens")
    second = plots.speedup_plot(tmp_path / "b.png", entries, title="tokens")
    assert first is not None
    assert second is not None
    assert is_drawn(first)
    assert first.read_bytes() == second.read_bytes()
    alone = plots.speedup_plot(
        tmp_path / "d.png", [replace(entry, task="qa") for entry in entries], title="qa"
    )
    assert alone is not None
    assert is_drawn(alone)
    without = replace(ENTRY, speedup=None, speedup_low=None, speedup_high=None)
    assert plots.speedup_plot(tmp_path / "c.png", [without], title="none") is None
    assert not (tmp_path / "c.png").exists()


def test_bars_have_the_names_that_are_given_and_muted_ones_are_grey(tmp_path: Path) -> None:
    entries = [ENTRY, replace(ENTRY, method="prompt-lookup")]

    def drawn(**how: Any) -> str:
        path = plots.speedup_plot(tmp_path / "bars.svg", entries, title="tokens", **how)
        assert path is not None
        return path.read_text()

    usual = drawn()
    assert "#999999" not in usual
    assert drawn(muted=("prompt-lookup",)).count("#999999") == 1
    named = drawn(names={"prompt-lookup": "the rival's"})
    assert "the rival's" in named
    assert "the rival's" not in usual


@pytest.mark.parametrize("name", ["lines.png", "lines.svg"])
def test_lines_are_drawn_with_their_units(tmp_path: Path, name: str) -> None:
    line = plots.Series(label="bf16", x=[1, 2, 4], y=[3.0, 3.0, 5.0], low=[2.0] * 3, high=[6.0] * 3)
    floor = plots.Series(label="floor", x=[1, 4], y=[1.0, 1.0], reference=True)
    path = plots.line_plot(
        tmp_path / name,
        [line, floor],
        title="a pass",
        x=plots.Axis(label="rows", log=True),
        y=plots.Axis(label="milliseconds", log=True),
    )
    if path.suffix == ".png":
        assert is_drawn(path)
    else:
        assert "milliseconds" in path.read_text()


def test_a_series_of_uneven_lists_is_refused() -> None:
    with pytest.raises(InputError, match="series"):
        plots.Series(label="x", x=[1, 2], y=[1.0])


def test_the_steps_of_token_speculation() -> None:
    # Five tokens a round; a round costs a check of 30 ms and a guess of 10 ms where a plain step costs 20.
    added = steps_speedup(tokens_per_round=5, plain_seconds=0.02, verify_seconds=0.03, draft_seconds=0.01)
    assert added == pytest.approx(2.5)
    with pytest.raises(InputError, match="verify_seconds"):
        steps_speedup(tokens_per_round=5, plain_seconds=0.02, verify_seconds=0, draft_seconds=0.01)


def test_retrieval_cannot_spare_more_than_itself() -> None:
    assert retrieval_ceiling(retrieval_seconds=3, generation_seconds=2) == 2.5
    with pytest.raises(InputError, match="generation_seconds"):
        retrieval_ceiling(retrieval_seconds=3, generation_seconds=0)


SMOLLM2 = DecoderShape(
    layers=30, hidden=576, intermediate=1536, heads=9, kv_heads=3, head_dim=64, vocabulary=49152
)


def test_the_floor_of_a_pass() -> None:
    # SmolLM2 has 134.5 million weights, its embeddings tied: norms are the only ones not counted here.
    assert SMOLLM2.layer_weights + SMOLLM2.head_weights == pytest.approx(134_515_008, rel=1e-3)
    one = decoder_work(SMOLLM2, rows=1, context=0, weight_bytes=2, cache_bytes=2)
    assert one.read_bytes == pytest.approx(269e6, rel=1e-2)
    assert one.operations == pytest.approx(2 * 134.5e6, rel=1e-2)
    behind = decoder_work(SMOLLM2, rows=1, context=999, weight_bytes=2, cache_bytes=2)
    assert behind.read_bytes - one.read_bytes == 999 * 30 * 2 * 3 * 64 * 2
    quiet = decoder_work(SMOLLM2, rows=1, context=0, weight_bytes=2, cache_bytes=2, output_rows=0)
    assert one.read_bytes - quiet.read_bytes == 2 * 576 * 49152
    floor = pass_floor(one, read_gb_s=50, rate_gop_s=400)
    assert floor.seconds == pytest.approx(5.4e-3, rel=0.01)
    assert floor.bound_by == "reading"
    many = decoder_work(SMOLLM2, rows=64, context=0, weight_bytes=2, cache_bytes=2)
    assert pass_floor(many, read_gb_s=50, rate_gop_s=400).bound_by == "computing"


def test_the_machine_is_described_and_measured() -> None:
    machine = describe_machine()
    assert machine.cores >= 1
    assert machine.memory_gib > 0
    assert any(package.startswith("torch ") for package in machine.packages)
    assert machine.fingerprint() == describe_machine().fingerprint()
    assert machine.fingerprint() != replace(machine, threads=machine.threads + 1).fingerprint()
    rates = measure_rates(read_bytes=2**24, size=128)
    assert 0.1 < rates.read_gb_s < 10_000
    assert rates.fp32_gflop_s > 0.1


def test_rates_follow_the_clock() -> None:
    ticks = iter(range(10_000))
    rates = measure_rates(read_bytes=2**20, size=64, clock=lambda: float(next(ticks)))
    assert rates.read_gb_s == pytest.approx(2**20 / 1e9)
    assert rates.fp32_gflop_s == pytest.approx(2 * 64**3 / 1e9)


def _touch(mib: int) -> mmap.mmap:
    """Fresh resident memory: pages of the kernel, since an allocator may hand out some that it has kept."""
    data = mmap.mmap(-1, mib * 2**20)
    for page in range(0, len(data), mmap.PAGESIZE):
        data[page] = 1
    return data


@pytest.fixture
def no_garbage() -> None:
    """Memory that earlier tests left, such as a model in a cycle, must not be given back meanwhile."""
    gc.collect()


@pytest.mark.usefixtures("no_garbage")
def test_peak_memory_sees_what_was_given_back() -> None:
    with peak_memory() as peak:
        _touch(64).close()
    with peak_memory() as small:
        sum(range(1000))
    assert 60 < peak.grown_mib < 90
    assert small.grown_mib < 8


@pytest.mark.usefixtures("no_garbage")
def test_peak_memory_samples_where_the_kernel_does_not_help(monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    from specrag.bench import memory

    monkeypatch.setattr(memory, "_reset_high_water", lambda: False)
    with peak_memory() as peak:
        data = _touch(64)
        time.sleep(0.1)
        data.close()
    assert not peak.exact
    assert 60 < peak.grown_mib < 90
