"""Measuring: suites, resumable records, interleaved timing, statistics and reports."""

from typing import TYPE_CHECKING

from specrag.lazy import lazy_names

if TYPE_CHECKING:
    from specrag.bench.data import data_folder, read_json_lines, read_text
    from specrag.bench.load import ProcessorLoad
    from specrag.bench.machine import describe_machine
    from specrag.bench.measurement import to_json_lines
    from specrag.bench.metrics import contains_answer, normalize_answer
    from specrag.bench.plots import Axis, Series, line_plot
    from specrag.bench.progress import TerminalProgress
    from specrag.bench.registry import SuiteRegistry, built_in_suites
    from specrag.bench.runner import BenchOptions, SuiteResult, run_suite, write_json_lines
else:
    __getattr__ = lazy_names(__name__)

__all__ = [
    "Axis",
    "BenchOptions",
    "ProcessorLoad",
    "Series",
    "SuiteRegistry",
    "SuiteResult",
    "TerminalProgress",
    "built_in_suites",
    "contains_answer",
    "data_folder",
    "describe_machine",
    "line_plot",
    "normalize_answer",
    "read_json_lines",
    "read_text",
    "run_suite",
    "to_json_lines",
    "write_json_lines",
]
