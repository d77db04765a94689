"""The frame of the command line, run as real processes: help, exit codes, one-line errors, start-up time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import pytest

from specrag.cli import main as frame
from specrag.errors import InputError

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


def specrag(*args: str) -> Result:
    # A wide terminal, so that no word of a help text is broken.
    environment = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "specrag", *args],
        capture_output=True,
        text=True,
        env=environment,
        stdin=subprocess.DEVNULL,
        timeout=60,
        check=False,
    )
    return Result(done.returncode, done.stdout, done.stderr)


def _commands() -> list[tuple[str, ...]]:
    """Every command that does something, as its words: ("models", "list"), ("generate",), ..."""
    words: list[tuple[str, ...]] = [(info.name or "",) for info in frame.app.registered_commands]
    for group in frame.app.registered_groups:
        assert group.typer_instance is not None
        for info in group.typer_instance.registered_commands:
            name = info.name or getattr(info.callback, "__name__", "").replace("_", "-")
            words.append((group.name or "", name))
    return words


def test_every_command_is_mounted() -> None:
    assert {words[0] for words in _commands()} == set(frame.COMMANDS)


def test_help_names_every_command() -> None:
    result = specrag("--help")
    assert result.code == 0
    assert "Example" in result.out
    assert [name for name in frame.COMMANDS if name not in result.out] == []


@pytest.mark.parametrize("words", _commands(), ids=" ".join)
def test_help_of_a_command(words: tuple[str, ...]) -> None:
    result = specrag(*words, "--help")
    assert result.code == 0
    assert "--json" in result.out
    assert f"specrag {' '.join(words)}" in result.out.split("Example", 1)[1], "no example of this command"


@pytest.mark.parametrize("words", _commands(), ids=" ".join)
def test_command_is_in_the_guide(words: tuple[str, ...]) -> None:
    guide = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    assert f"specrag {' '.join(words)}" in guide


def test_version() -> None:
    result = specrag("--version")
    assert (result.code, result.out) == (0, f"specrag {version('specrag')}\n")


def test_help_starts_fast_and_without_torch() -> None:
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        assert specrag("--help").code == 0
        seconds.append(time.perf_counter() - start)
    heavy = {"torch", "transformers", "numba", "faiss", "bm25s"}
    code = f"import sys, specrag.cli.main; sys.exit(bool({heavy!r} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    # Half a second on a quiet machine; the best of three and four times that leaves room for a busy one.
    assert min(seconds) < 2.0


@pytest.mark.parametrize("args", [("no-such-command",), ("--no-such-option",), ("models", "no-such-command")])
def test_wrong_usage_is_one_line(args: tuple[str, ...]) -> None:
    result = specrag(*args)
    assert result.code == 2
    assert result.out == ""
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1
    assert args[-1] in result.err


def test_no_arguments_print_the_help() -> None:
    result = specrag()
    assert result.code == 2
    assert "Usage" in result.out
    assert "error" not in result.err


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """Mount a command that raises whatever the test puts into the list."""
    errors: list[BaseException] = []

    def fail() -> None:
        raise errors[0]

    monkeypatch.setattr(frame.app, "registered_commands", [*frame.app.registered_commands])
    frame.app.command("fail")(fail)
    return errors


def test_own_error_is_one_line(failing: list[BaseException], capsys: pytest.CaptureFixture[str]) -> None:
    failing.append(InputError("temperature", -1, "give 0 or more\nlike 0.7"))
    assert frame.run(["fail"]) == 1
    assert capsys.readouterr().err == "error: temperature: -1 is not usable: give 0 or more like 0.7\n"


def test_unexpected_error_is_one_line(
    failing: list[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    failing.append(KeyError("weight"))
    assert frame.run(["fail"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: KeyError: 'weight' ")
    assert "--debug" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("args", [["--debug", "fail"], ["fail", "--debug"]])
def test_debug_shows_the_traceback(
    args: list[str], failing: list[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    failing.append(InputError("seed", "x", "give an integer"))
    assert frame.run(args) == 1
    error = capsys.readouterr().err
    assert "Traceback" in error
    assert error.endswith("error: seed: 'x' is not usable: give an integer\n")


def test_debug_behind_two_dashes_is_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert frame.run(["--", "--debug"]) == 2
    assert "--debug" in capsys.readouterr().err


def test_interrupt_gives_130(failing: list[BaseException]) -> None:
    failing.append(KeyboardInterrupt())
    assert frame.run(["fail"]) == 130


def test_real_interrupt_leaves_no_traceback() -> None:
    code = (
        "import time\nfrom specrag.cli import main as frame\n"
        "def wait() -> None:\n    print('waiting', flush=True)\n    time.sleep(60)\n"
        "frame.app.command('wait')(wait)\nimport sys\nsys.exit(frame.run(['wait']))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in error


def test_closed_pipe_is_no_error() -> None:
    command = f'"{sys.executable}" -m specrag --help | true; exit "${{PIPESTATUS[0]}}"'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode in {0, 1}  # 0 if the help fitted into the pipe before it closed
    assert done.stderr == ""
