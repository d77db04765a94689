"""Runs one suite from its options to its files: records, JSON lines, page and pictures."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from specrag.artifacts import atomic_write
from specrag.bench import plots, report
from specrag.bench.interleave import Clock
from specrag.bench.load import LoadMonitor, load_note
from specrag.bench.machine import Machine
from specrag.bench.measurement import Measurement, to_json_lines
from specrag.bench.progress import Progress
from specrag.bench.records import Record, RecordStore
from specrag.bench.suite import BenchContext, Illustrated, Selection, Suite
from specrag.errors import InputError, SpecragError

_PACKAGE = Path(__file__).resolve().parents[1]
RECORDS_FOLDER = ".records"


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What the user chose.

    Args:
        out: folder for ``SUITE.jsonl``, ``SUITE.md``, the pictures, and the records in ``.records``.
        model, device: the target model's name, and torch's name of the device.
        command: the command that repeats the run, for the page.
        quick: the short run.
        data: folder of the user's data.
        repeats: timed runs of each method on a row; None for the suite's choice.
        rows: most rows of each task; None for all.
        tasks, methods: patterns of the names to run, one of which has to match; none for all.
        fresh: start without the old records, which are kept as ``NAME.old``.
        retry_failed: run failures again when resuming.
        adapters: RAG drafters to compare, for the suite that compares them.
        dtype: how the models hold their weights, for suites that leave it open: ``bf16`` or ``int8``.
        draw: draw pictures.
    """

    out: Path
    model: str
    device: str
    command: str = ""
    quick: bool = False
    data: Path | None = None
    repeats: int | None = None
    rows: int | None = None
    tasks: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    fresh: bool = False
    retry_failed: bool = False
    adapters: tuple[Path, ...] = ()
    dtype: str = "bf16"
    draw: bool = True

    def __post_init__(self) -> None:
        if self.repeats is not None and self.repeats < 1:
            raise InputError("--repeats", self.repeats, "give 1 or more")
        if self.rows is not None and self.rows < 1:
            raise InputError("--rows", self.rows, "give 1 or more")


@dataclass(frozen=True, kw_only=True)
class SuiteResult:
    """The results of a run: the figures, the page's text, and the files below the chosen folder."""

    measurements: tuple[Measurement, ...]
    page: str
    files: tuple[Path, ...]


def run_suite(
    suite: Suite,
    options: BenchOptions,
    *,
    machine: Machine,
    clock: Clock,
    load: LoadMonitor,
    progress: Progress,
    load_before: float | None = None,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
) -> SuiteResult:
    """Run a suite, resuming from its records, and write its files when all of it is done.

    A stopped run leaves its records and no half-written results.

    Args:
        load_before: share of the processors that others used before the run.

    Raises:
        SpecragError: the folder cannot be written, or nothing could be measured.
        InputError: the suite gave a measurement with another suite's name, or a pattern matches nothing.
    """
    if options.draw:
        plots.check_plotting()
    version = code_version()
    selection = Selection(options.tasks, options.methods)
    store = RecordStore(
        _records_folder(options.out) / f"{suite.name}.jsonl",
        suite=suite.name,
        version=version,
        setting=_setting(options, machine),
        fresh=options.fresh,
        retry_failed=options.retry_failed,
    )
    with store:
        context = BenchContext(
            suite=suite.name,
            quick=options.quick,
            data=options.data,
            out=options.out,
            model=options.model,
            device=options.device,
            repeats=options.repeats,
            rows=options.rows,
            selection=selection,
            adapters=options.adapters,
            dtype=options.dtype,
            command=options.command,
            version=version,
            date=now().date().isoformat(),
            machine=machine,
            records=store,
            clock=clock,
            load=load,
            progress=progress,
        )
        measurements = tuple(suite.run(context))
        records = store.current()
    selection.check()
    for measurement in measurements:
        if measurement.suite != suite.name:
            raise InputError("suite", measurement.suite, f"measurements of this suite are named {suite.name}")
    if not measurements:
        raise SpecragError(f"bench: suite {suite.name} gave no measurement")
    return _write(suite, options, measurements, records, machine, load_before)


def write_json_lines(path: Path, measurements: Sequence[Measurement]) -> Path:
    """Write measurements to ``path``, completely or not at all.

    Raises:
        SpecragError: it cannot be written.
    """
    return _write_whole(path, to_json_lines(measurements))


def _records_folder(out: Path) -> Path:
    folder = out / RECORDS_FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Results are committed, the records behind them are not.
        (folder / ".gitignore").write_text("*\n")
    except OSError as error:
        raise SpecragError(f"--out: {out} cannot be written ({error.strerror})") from error
    return folder


def _setting(options: BenchOptions, machine: Machine) -> str:
    """Everything that a time depends on besides the code; records of another setting are not used."""
    data = "sample" if options.data is None else options.data.resolve().name
    length = "quick" if options.quick else "full"
    # bf16 is not named, since its records predate the choice.
    weights = "" if options.dtype == "bf16" else f" {options.dtype}"
    return f"{options.model}{weights} {options.device} {length} {data} {machine.fingerprint()}"


def _write(
    suite: Suite,
    options: BenchOptions,
    measurements: tuple[Measurement, ...],
    records: Sequence[Record],
    machine: Machine,
    load_before: float | None,
) -> SuiteResult:
    pictures = _draw(suite, measurements, options.out) if options.draw else []
    shares = [record.other_cpu for record in records if record.other_cpu is not None]
    page = report.render(
        report.Page(
            title=f"Results: {suite.name}" + (" (quick)" if options.quick else ""),
            summary=suite.summary,
            machine=machine.describe(),
            load=load_note(load_before, shares),
            pictures=[path.name for path in pictures],
            failures=[_failure(record) for record in records if record.error is not None],
        ),
        measurements,
    )
    files = (
        write_json_lines(options.out / f"{suite.name}.jsonl", measurements),
        _write_whole(options.out / f"{suite.name}.md", page),
        *pictures,
    )
    return SuiteResult(measurements=measurements, page=page, files=files)


def _failure(record: Record) -> str:
    key = record.key
    return f"{key.task}, {key.row}, {key.method}, repeat {key.repeat}: {record.error}"


def _draw(suite: Suite, measurements: Sequence[Measurement], folder: Path) -> list[Path]:
    if isinstance(suite, Illustrated):
        return list(suite.pictures(measurements, folder))
    title = f"{suite.name}: speed-up by task"
    drawn = plots.speedup_plot(folder / f"{suite.name}.png", measurements, title=title)
    return [] if drawn is None else [drawn]


def _write_whole(path: Path, text: str) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, text.encode(), shared=True)
    except OSError as error:
        raise SpecragError(f"results: {path} cannot be written ({error.strerror})") from error
    return path


def code_version(package: Path = _PACKAGE) -> str:
    """The code's version, for example ``0.1.0+g1a2b3c4`` or ``0.1.0+g1a2b3c4.dirty5d6e7f80``.

    In a checkout it names the last commit that changed the package or its ``benchmarks`` (not simply the last commit: a
    commit to the documents must not invalidate a long run's records) and, if their files differ from that commit, a
    hash of their whole source. Elsewhere it is just the installed package's version.

    Args:
        package: the folder of the package, ``src/specrag`` in a checkout.
    """
    try:
        release = version("specrag")
    except PackageNotFoundError:
        release = "0"
    if not _is_checkout(package):
        return release
    measured = [".", ":(top)benchmarks"]
    commit = _git(package, "log", "-1", "--format=%h", "--", *measured) or "none"
    local = f"g{commit}"
    if commit == "none" or _git(package, "status", "--porcelain", "--", *measured):
        local += f".dirty{_source_hash(package)}"
    return f"{release}+{local}"


def _is_checkout(package: Path) -> bool:
    """True for ``src/NAME`` at a repository's top: an installed copy may lie inside another project's checkout."""
    top = _git(package, "rev-parse", "--show-toplevel")
    return top is not None and package.resolve() == (Path(top) / "src" / package.name).resolve()


def _git(folder: Path, *arguments: str) -> str | None:
    """Git's output without the last newline; None if git fails or is missing."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _source_hash(package: Path) -> str:
    digest = hashlib.sha256()
    benchmarks = package.parents[1] / "benchmarks"
    for path in [*sorted(package.rglob("*.py")), *sorted(benchmarks.rglob("*.py"))]:
        digest.update(f"{path.relative_to(package.parents[1]).as_posix()}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]
