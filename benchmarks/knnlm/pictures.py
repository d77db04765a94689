"""The pictures of the kNN-LM suite."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.knnlm.subjects import ASYNCHRONOUS, BOTH, FIXED, SCHEDULED, UNCAPPED, WEIGHED
from specrag.bench.measurement import Measurement
from specrag.bench.plots import Axis, Series, line_plot

#: Ends the name of a mixture whose weight depends on the distance.
BY_DISTANCE = "+reach"
SPEED, SLOWED, PERPLEXITY, EXACT = "speed", "slowed store", "perplexity", "exactness"

_BY_K = (BOTH, FIXED, "knn-lm+stride=8", SCHEDULED, UNCAPPED, WEIGHED, ASYNCHRONOUS)


def draw(measurements: Sequence[Measurement], folder: Path) -> list[Path]:
    """All pictures that the measurements allow."""
    return [
        *_by_k(measurements, folder),
        *_by_stride(measurements, folder),
        *_slowed(measurements, folder),
        *_perplexities(measurements, folder),
    ]


def _by_k(measurements: Sequence[Measurement], folder: Path) -> Iterator[Path]:
    """Speed-up over k, a picture a datastore and index (RaLMSpec, Figure 5)."""
    entries = _section(measurements, SPEED)
    for number, (store, mine) in enumerate(_by_store(entries), 1):
        series = _lines(mine, _BY_K, _k)
        if series:
            yield line_plot(
                folder / f"knnlm-k-{number}.png",
                series,
                title=f"Speculative kNN-LM by k: {store}",
                x=Axis(label="neighbours k", log=True),
                y=Axis(label="speed-up (sequential = 1)"),
            )


def _by_stride(measurements: Sequence[Measurement], folder: Path) -> Iterator[Path]:
    """Speed-up over fixed strides, a picture a datastore and index, a line a k."""
    entries = [entry for entry in _section(measurements, SPEED) if _stride(entry) is not None]
    for number, (store, mine) in enumerate(_by_store(entries), 1):
        series = []
        for k in sorted({_k(entry) for entry in mine}):
            points = sorted(
                (float(_stride(entry) or 0), entry.speedup or 0.0) for entry in mine if _k(entry) == k
            )
            if len(points) > 1:
                series.append(
                    Series(label=f"k = {k:,.0f}", x=[x for x, _ in points], y=[y for _, y in points])
                )
        if series:
            yield line_plot(
                folder / f"knnlm-stride-{number}.png",
                series,
                title=f"Speculative kNN-LM by fixed stride: {store}",
                x=Axis(label="stride", log=True),
                y=Axis(label="speed-up (sequential = 1)"),
            )


def _slowed(measurements: Sequence[Measurement], folder: Path) -> Iterator[Path]:
    entries = [entry for entry in _section(measurements, SLOWED) if entry.speedup is not None]
    series = _lines(entries, (BOTH, FIXED, UNCAPPED, WEIGHED, ASYNCHRONOUS), _last_number)
    ceiling = sorted(
        (_last_number(entry), entry.ceiling)
        for entry in entries
        if entry.method == UNCAPPED and entry.ceiling is not None
    )
    if series:
        if ceiling:
            line = Series(
                label="ceiling: 1 + R/G (above it: error of measurement)",
                x=[x for x, _ in ceiling],
                y=[y for _, y in ceiling],
                reference=True,
            )
            series.append(line)
        yield line_plot(
            folder / "knnlm-slowed.png",
            series,
            title="Speculative kNN-LM over an index slowed to a given R/G (simulated)",
            x=Axis(label="R/G of sequential kNN-LM", log=True),
            y=Axis(label="speed-up (sequential = 1)"),
        )


def _perplexities(measurements: Sequence[Measurement], folder: Path) -> Iterator[Path]:
    entries = [entry for entry in _section(measurements, PERPLEXITY) if entry.method.startswith("knn-lm+k=")]
    series = []
    for task in dict.fromkeys(entry.task for entry in entries):
        mine = [entry for entry in entries if entry.task == task]
        plain = float(str(mine[0].extra["plain_perplexity"]))
        name = task.split("/", 1)[1]
        for label, by_distance in ((name, False), (f"{name}: weight by distance", True)):
            points = sorted(
                (_k_of_method(entry), float(str(entry.extra["perplexity"])))
                for entry in mine
                if entry.method.endswith(BY_DISTANCE) == by_distance
            )
            series.append(Series(label=label, x=[x for x, _ in points], y=[y for _, y in points]))
        ends = [points[0][0], points[-1][0]]
        series.append(Series(label=f"{name}: model alone", x=ends, y=[plain, plain], reference=True))
    if series:
        yield line_plot(
            folder / "knnlm-perplexity.png",
            series,
            title="Perplexity of the test text by k, weight and temperature chosen on its other half",
            x=Axis(label="neighbours k", log=True),
            y=Axis(label="perplexity"),
        )


def _lines(
    entries: Sequence[Measurement], methods: Sequence[str], x: Callable[[Measurement], float]
) -> list[Series]:
    series = []
    for method in methods:
        points = sorted((x(entry), entry.speedup or 0.0) for entry in entries if entry.method == method)
        if points:
            series.append(Series(label=method, x=[at for at, _ in points], y=[value for _, value in points]))
    return series


def _by_store(entries: Sequence[Measurement]) -> Iterator[tuple[str, list[Measurement]]]:
    """Each datastore and index with its speed-ups."""
    for store in dict.fromkeys(_store(entry) for entry in entries):
        yield store, [entry for entry in entries if _store(entry) == store and entry.speedup is not None]


def _section(measurements: Sequence[Measurement], name: str) -> list[Measurement]:
    return [entry for entry in measurements if entry.task.startswith(f"{name}/")]


def _store(entry: Measurement) -> str:
    return entry.task.split("/", 1)[1].rpartition(", k=")[0]


def _k(entry: Measurement) -> float:
    return float(entry.task.rpartition("k=")[2])


def _k_of_method(entry: Measurement) -> float:
    return float(entry.method.removesuffix(BY_DISTANCE).rpartition("k=")[2])


def _stride(entry: Measurement) -> int | None:
    if entry.method == FIXED:
        return 3
    found = re.fullmatch(r"knn-lm\+stride=(\d+)", entry.method)
    return None if found is None else int(found[1])


def _last_number(entry: Measurement) -> float:
    return float(re.findall(r"\d+(?:\.\d+)?", entry.task)[-1])
