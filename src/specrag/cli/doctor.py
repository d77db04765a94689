"""``specrag doctor``: what is on this machine, and does it work?"""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from specrag.errors import SpecragError

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from specrag.cli.selftest import Check

_MODEL = "smollm2-135m"
_PACKAGES = ("specrag", "torch", "transformers", "tokenizers", "numpy")

#: Flags of Linux's /proc/cpuinfo that change how fast low precision is, on x86-64 and on ARM.
_INSTRUCTION_SETS = (
    "avx2",
    "avx512f",
    "avx512_bf16",
    "avx512_vnni",
    "avx_vnni",
    "amx_bf16",
    "amx_int8",
    "asimddp",
    "bf16",
    "i8mm",
    "sve",
)


@dataclass(frozen=True)
class Hardware:
    """The hardware that computes.

    Attributes:
        threads: threads that torch uses.
        memory_bytes, free_bytes: main memory in all, and what programs can still get.
        gpus: name and memory of each.
    """

    processor: str
    cores: int
    threads: int
    instruction_sets: tuple[str, ...]
    onednn: bool
    gpus: tuple[str, ...]
    memory_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class Home:
    """Where models are kept."""

    path: str
    writable: bool
    free_bytes: int


@dataclass(frozen=True)
class Report:
    """All that the doctor found.

    Attributes:
        models: name to bytes on disk, of the models that have been pulled.
        speeds: tokens per second of plain decoding with the small model, by type and device.
        default: how models of the Llama family load here, and what that means for their texts.
    """

    versions: Mapping[str, str]
    hardware: Hardware
    home: Home
    models: Mapping[str, int]
    checks: tuple[Check, ...]
    speeds: Mapping[str, float]
    default: str

    @property
    def failed(self) -> int:
        """Number of failed checks."""
        return sum(check.state == "failed" for check in self.checks)

    @property
    def skipped(self) -> int:
        """Number of checks that could not be made."""
        return sum(check.state == "skipped" for check in self.checks)

    @property
    def verdict(self) -> str:
        """The outcome in one line."""
        if self.failed:
            return f"{_count(self.failed, 'check')} failed"
        if self.skipped:
            return f"no check failed, {self.skipped} skipped"
        return f"all {len(self.checks)} checks passed"


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
    pull: Annotated[bool, typer.Option("--pull", help=f"Fetch {_MODEL} (93 MB) if it is not here.")] = False,
) -> None:
    """Show versions, devices, memory and models, and run a short self-test. Exit code 1 if a check fails.

    Example: specrag doctor
    """
    from rich.console import Console

    if pull:
        from specrag.models import catalog

        catalog.resolve(_MODEL, progress=True)
    with Console(stderr=True).status("testing this machine"):
        report = examine()
    if as_json:
        typer.echo(json.dumps({**asdict(report), "verdict": report.verdict, "ok": not report.failed}))
    else:
        Console().print(render(report))
    if report.failed:
        raise typer.Exit(1)


def examine() -> Report:
    """Look at the machine and run the self-test; half a minute on a slow machine."""
    from specrag.cli.selftest import Check, measure_speeds, run_checks
    from specrag.models import catalog

    models = {model.name: model.bytes for model in catalog.list_models() if model.pulled}
    hardware = _hardware()
    home = _home()
    checks = [_check_home(home), *(_check_files(name) for name in models)]
    speeds: dict[str, float] = {}
    if _MODEL in models:
        devices = ("cpu", *(f"cuda:{number}" for number in range(len(hardware.gpus))))
        checks += run_checks(_MODEL, devices)
        speeds = measure_speeds(_MODEL, devices)
    else:
        checks.append(Check("self-test", "skipped", f"it needs {_MODEL}: run `specrag doctor --pull`"))
    return Report(
        versions={"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES},
        hardware=hardware,
        home=home,
        models=models,
        checks=tuple(checks),
        speeds=speeds,
        default=_default() if _MODEL in models else "unknown before a model is here",
    )


def _default() -> str:
    """What :func:`specrag.load` does with the small model where nothing is said."""
    from specrag.models import catalog, default_dtype, default_invariance, find_device

    device = find_device(None)
    try:
        files = catalog.resolve(_MODEL)
        dtype = default_dtype(files, device)
        invariant = default_invariance(files, dtype, device)
    except SpecragError as error:
        return str(error)
    if invariant:
        return f"{dtype}, batch_invariant: lossless methods write plain decoding's text"
    return (
        f"{dtype}, not batch_invariant: near-ties may part; on a CPU -o batch_invariant=true gives one text"
    )


def _check_home(home: Home) -> Check:
    from specrag.cli.selftest import Check

    name = "models can be stored"
    if not home.writable:
        return Check(name, "failed", f"{home.path} is read-only: set SPECRAG_HOME to a folder of yours")
    return Check(name, "passed", f"{_gigabytes(home.free_bytes)} free")


def _check_files(model: str) -> Check:
    from specrag.cli.selftest import Check
    from specrag.models import catalog

    try:
        catalog.path(model)
    except SpecragError as error:
        return Check(f"files of {model}", "failed", str(error))
    return Check(f"files of {model}", "passed", "complete")


def _hardware() -> Hardware:
    import torch

    from specrag.bench import describe_machine

    machine = describe_machine()
    gpus = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    memory = _memory()
    return Hardware(
        processor=machine.processor,
        cores=machine.cores,
        threads=machine.threads,
        instruction_sets=_instruction_sets(),
        onednn=torch.backends.mkldnn.is_available(),
        gpus=tuple(f"{gpu.name}, {_gigabytes(gpu.total_memory)}" for gpu in gpus),
        memory_bytes=memory.get("MemTotal", int(machine.memory_gib * 2**30)),
        free_bytes=memory.get("MemAvailable", 0),
    )


def _memory() -> dict[str, int]:
    """Bytes by the names of Linux's /proc/meminfo; empty elsewhere."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return {}
    return {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}


def _instruction_sets() -> tuple[str, ...]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ()
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "").split()
    return tuple(name for name in _INSTRUCTION_SETS if name in flags)


def _home() -> Home:
    from specrag.models.catalog import home

    path = home()
    there = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    return Home(str(path), there.is_dir() and os.access(there, os.W_OK), shutil.disk_usage(there).free)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"


def render(report: Report) -> Group:
    """The report as tables for a terminal."""
    from rich.console import Group
    from rich.text import Text

    hardware, home = report.hardware, report.home
    machine = {
        "processor": hardware.processor,
        "cores": f"{hardware.cores}, torch uses {_count(hardware.threads, 'thread')}",
        "instructions": ", ".join(hardware.instruction_sets) or "none that matter here",
        "oneDNN": "yes" if hardware.onednn else "no: 8-bit layers cannot run",
        "GPUs": "; ".join(hardware.gpus) or "none",
        "memory": f"{_gigabytes(hardware.memory_bytes)}, {_gigabytes(hardware.free_bytes)} free",
    }
    models = {name: _gigabytes(size) for name, size in report.models.items()}
    speeds = {where: f"{speed:.1f} tokens/s" for where, speed in report.speeds.items()}
    colour = "red" if report.failed else "yellow" if report.skipped else "green"
    return Group(
        _section("Versions", report.versions),
        _section("Machine", machine),
        _section("Models", {"kept in": home.path, "disk": f"{_gigabytes(home.free_bytes)} free"} | models),
        _section("Loaded by default", {"": report.default}),
        _checks(report.checks),
        _section(f"Plain decoding with {_MODEL}", speeds or {"not measured": "the model is not here"}),
        Text(f"\n{report.verdict}", style=f"bold {colour}"),
    )


def _table(title: str) -> Table:
    from rich.table import Table

    return Table(
        box=None,
        show_header=False,
        pad_edge=False,
        title=f"\n{title}",
        title_justify="left",
        title_style="bold cyan",
    )


def _section(title: str, lines: Mapping[str, str]) -> Table:
    table = _table(title)
    table.add_column(style="dim", min_width=20, no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in lines.items():
        table.add_row(name, value)
    return table


def _checks(checks: tuple[Check, ...]) -> Table:
    marks = {"passed": "[green]✓[/]", "failed": "[red]✗[/]", "skipped": "[yellow]-[/]"}
    table = _table("Checks")
    table.add_column(no_wrap=True)
    table.add_column()
    table.add_column(style="dim", overflow="fold")
    for check in checks:
        table.add_row(marks[check.state], check.name, check.detail)
    return table
