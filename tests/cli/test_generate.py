"""``specrag generate`` as people and scripts use it: real processes, pipes and pseudo-terminals."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import specrag as package
from specrag.cli import main as frame
from specrag.cli import render
from specrag.cli.resources import LocalResources
from specrag.cli.values import ModelValues
from specrag.errors import InputError
from specrag.methods.resources import SharedMethods
from specrag.request import Result, Timing, Usage
from tests.cli.shell import COMMAND, specrag

PROMPT = "Name three uses of copper."
STATUS = re.compile(
    r"(\d+) tokens?, [\d.]+ tokens/s; prefill [\d.]+ s, decoding [\d.]+ s"
    r"(?:; [\d.]+ tokens a pass, \d+ of \d+ guesses accepted)?(; cut at the limit)?\n"
)


@pytest.fixture(scope="module")
def expected(smollm2: Path) -> Result:
    """What Python gives for the prompt of these tests."""
    return package.load("smollm2-135m").generate(PROMPT, max_tokens=12, method="plain")


@dataclass(frozen=True)
class Session:
    """What a command showed.

    Attributes:
        screen: but for what moved there.
        shown: with it.
    """

    code: int
    screen: str
    shown: str


#: A moving sign with its text, from where the cursor is hidden to where the line is empty again; or the first bytes of
#: that which may be one.
_MOVING = re.compile(rb"\x1b\[\?25l.*?(?:\x1b\[1A\x1b\[2K|\Z)|\x1b(?:\[(?:\?(?:25?)?)?)?\Z", re.DOTALL)


class Terminal:
    """A command line in a pseudo-terminal that is its controlling one, so that Ctrl-C is a key."""

    def __init__(self, *words: str) -> None:
        self._keyboard, inside = pty.openpty()
        take = (
            "import fcntl, os, sys, termios\n"
            "fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
            "os.execv(sys.argv[1], sys.argv[1:])"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", take, *COMMAND, *words],
            stdin=inside,
            stdout=inside,
            stderr=inside,
            start_new_session=True,
        )
        os.close(inside)
        self._shown = b""
        self._given = 0

    @property
    def told_of_loading(self) -> bool:
        """Whether something moved on the screen while the model was loaded."""
        return b" loading smollm2-135m" in self._shown

    def press_ctrl_c(self) -> None:
        os.write(self._keyboard, b"\x03")

    def read(self, at_least: int | None = None) -> str:
        """The next characters on the screen, but for what moves there; by default all until the command has ended."""
        screen = b""
        while at_least is None or len(screen) < at_least:
            try:
                self._shown += os.read(self._keyboard, 4096)
            except OSError:  # the way Linux says that the last writer has closed the terminal
                break
            screen = _MOVING.sub(b"", self._shown)[self._given :]
        self._given += len(screen)
        return screen.decode()

    def end(self) -> Session:
        screen = self.read()
        code = self.process.wait(timeout=60)
        os.close(self._keyboard)
        return Session(code, screen, self._shown.decode())


def test_text_and_status_are_apart(expected: Result) -> None:
    result = specrag("generate", PROMPT, "-m", "plain", "--max-tokens", "12")
    assert result.code == 0, result.err
    assert result.out == expected.text + "\n"
    status = STATUS.fullmatch(result.err)
    assert status, result.err
    assert status[1] == "12"
    assert status[2] == "; cut at the limit"


def test_json(expected: Result) -> None:
    result = specrag("generate", PROMPT, "--max-tokens", "12", "-m", "plain", "-o", "log_probs=2", "--json")
    assert (result.code, result.err) == (0, "")
    found = json.loads(result.out)
    assert found["text"] == expected.text
    assert [token["id"] for token in found["tokens"]] == [token.token for token in expected.tokens]
    assert {token["source"] for token in found["tokens"]} == {"target"}
    for token in found["tokens"]:
        best, second = token["alternatives"]
        assert token["id"] == best["id"]  # greedy
        assert 0 >= token["log_prob"] == best["log_prob"] >= second["log_prob"]
    assert found["finish_reason"] == "length"
    assert found["usage"]["prompt_tokens"] == expected.usage.prompt_tokens
    assert found["usage"]["completion_tokens"] == found["usage"]["passes"] == 12
    assert found["usage"]["seconds"]["prefill"] > 0
    assert found["usage"]["seconds"]["decode"] > 0
    assert (found["model"], found["dtype"], found["method"]) == ("smollm2-135m", "int8", "plain")


@dataclass
class Recorder:
    """Stands for a model and notes how it is loaded and what it is asked."""

    loading: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    shared: SharedMethods = field(default_factory=SharedMethods)
    context_length: int = 100
    loaded: Any = field(default_factory=lambda: SimpleNamespace(batch_invariant=False))

    def load(self, name: str, **options: Any) -> Recorder:
        self.loading = {"name": name, **options}
        return self

    def encode(self, prompt: Any, *, raw: bool = False) -> list[int]:
        self.options = {"prompt": prompt, "raw": raw}
        return [1]

    def close(self) -> None:
        """Nothing was opened."""

    def generating(self, prompt: Any, options: dict[str, Any]) -> None:
        self.options |= options
        raise InputError("recorder", None, "enough is known")


def test_every_option_reaches_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    monkeypatch.setattr("specrag.language_model.load", recorder.load)
    words = ["--max-tokens", "24", "--temperature", "1.25", "--raw", "--model", "some-model", "-m", "plain"]
    given = (
        "top_k=50 top_p=0.95 min_p=0.01 repetition_penalty=1.5 presence_penalty=0.5 frequency_penalty=0.25 "
    )
    given += "logit_bias=28=-2 logit-bias=30=-inf seed=7 timeout=200 stop=one stop=two log_probs=3 "
    given += "dtype=fp16 device=cpu adapter=some-folder batch_invariant=true kv_dtype=int8"
    words += [word for option in given.split() for word in ("-o", option)]
    assert frame.run(["generate", "Hello", *words]) == 1
    method = recorder.options.pop("method")
    assert method.name == "plain"
    assert recorder.options == {
        "prompt": "Hello",
        "max_tokens": 24,
        "temperature": 1.25,
        "top_k": 50,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "logit_bias": {28: -2.0, 30: float("-inf")},
        "seed": 7,
        "timeout": 200.0,
        "stop": ("one", "two"),
        "log_probs": 3,
        "raw": True,
        "ignore_eos": False,
    }
    assert recorder.loading == {
        "name": "some-model",
        "dtype": "fp16",
        "device": "cpu",
        "adapter": "some-folder",
        "batch_invariant": True,
        "kv_dtype": "int8",
        "progress": True,
    }


def test_sampled_text_is_the_text_that_python_gives(smollm2: Path, tmp_path: Path) -> None:
    llm = package.load("smollm2-135m", dtype="int8", batch_invariant=True)
    question = tmp_path / "question.txt"
    question.write_text("Tell me about rivers.\n", encoding="utf-8")
    messages = [
        {"role": "system", "content": "You are a poet."},
        {"role": "user", "content": "Tell me about rivers."},
    ]
    wanted = llm.generate(
        messages,
        max_tokens=24,
        temperature=1.3,
        top_k=50,
        top_p=0.95,
        min_p=0.01,
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias={28: -2.0, 30: float("-inf")},
        seed=7,
        stop=["zzz", "\n\n"],
    )
    given = (
        "top_k=50 top_p=0.95 min_p=0.01 repetition_penalty=1.1 presence_penalty=0.5 frequency_penalty=0.25 "
    )
    given += "logit_bias=28=-2,30=-inf seed=7 dtype=int8 batch_invariant=true device=cpu timeout=200 stop=zzz"
    options = [word for option in (*given.split(), "stop=\n\n") for word in ("-o", option)]
    options += ["--max-tokens", "24", "--temperature", "1.3", "--system", "You are a poet.", "--json"]
    result = specrag("generate", *options, "--file", str(question))
    assert result.code == 0, result.err
    found = json.loads(result.out)
    assert found["text"] == wanted.text
    assert [token["id"] for token in found["tokens"]] == [token.token for token in wanted.tokens]


def test_prompt_from_standard_input(expected: Result) -> None:
    for words in ((), ("--file", "-")):
        result = specrag(
            "generate", *words, "-m", "plain", "--max-tokens", "12", stdin=f"{PROMPT}\n".encode()
        )
        assert result.out == expected.text + "\n"


def test_raw_prompt_is_continued(smollm2: Path) -> None:
    result = specrag("generate", "--raw", "The capital of France is", "--max-tokens", "4", "-o", "stop=.")
    assert "Paris" in result.out


def test_log_probs_for_people(smollm2: Path) -> None:
    result = specrag("generate", PROMPT, "--max-tokens", "3", "-o", "log_probs=2", COLUMNS="120")
    header, *rows, status = result.err.splitlines()
    assert header.split() == ["token", "log-probability", "alternatives"]
    assert len(rows) == 3
    assert all(row.count("%") == 3 for row in rows)
    assert STATUS.fullmatch(status + "\n")


def test_timeout_keeps_the_partial_text(smollm2: Path) -> None:
    # Compiles the loops, which may take longer than the timeout.
    specrag("generate", PROMPT, "--max-tokens", "2")
    result = specrag("generate", "Tell a long story.", "--max-tokens", "8000", "-o", "timeout=4")
    assert result.code == 1
    assert len(result.out) > 1
    assert result.out.endswith("\n")
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1
    assert "deadline" in result.err


def test_interrupt_leaves_a_clean_terminal(smollm2: Path) -> None:
    terminal = Terminal("generate", "Write a long story about a river.", "--max-tokens", "8000")
    shown = terminal.read(at_least=30)
    terminal.press_ctrl_c()
    session = terminal.end()
    assert session.code == 130
    text, _, rest = (shown + session.screen).partition("^C")  # the terminal's own echo of the key
    assert len(text) >= 30
    assert text.replace("\r\n", " ").isprintable()
    assert rest.endswith("\x1b[0m\x1b[?25h\r\n")  # colours and cursor as they were, on a line of their own
    assert "Traceback" not in rest
    assert "error" not in rest


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc to know when loading has begun")
def test_interrupt_while_loading(smollm2: Path) -> None:
    terminal = Terminal("generate", PROMPT, "--max-tokens", "8000")
    libraries = Path(f"/proc/{terminal.process.pid}/maps")
    while "libtorch" not in libraries.read_text(encoding="utf-8"):
        time.sleep(0.01)
    terminal.press_ctrl_c()
    session = terminal.end()
    assert session.code == 130
    assert session.screen.replace("^C", "").strip() == "\x1b[0m\x1b[?25h"


def test_colours_end_with_the_status_line(smollm2: Path) -> None:
    llm = package.load("smollm2-135m", batch_invariant=True)
    expected = llm.generate(PROMPT, max_tokens=12, method="plain")
    # Where the default is not exact, a note on that would stand first.
    words = ["generate", PROMPT, "-m", "plain", "--max-tokens", "12", "-o", "batch_invariant=true"]
    session = Terminal(*words).end()
    assert session.code == 0
    assert session.screen.startswith(expected.text.replace("\n", "\r\n"))
    status = session.screen.replace("\r\n", "\n").removeprefix(expected.text + "\n")
    dim = re.fullmatch(r"\x1b\[2m(.*)\x1b\[0m\n", status)
    assert dim
    assert STATUS.fullmatch(dim[1] + "\n")
    assert "\x1b[?25l" not in session.screen


def test_no_prompt_in_a_terminal_asks_for_one() -> None:
    session = Terminal("generate").end()
    assert session.code == 1
    assert "error: prompt" in session.screen
    assert "--file" in session.screen


def test_closed_pipe_ends_quietly(smollm2: Path) -> None:
    line = '"$@" | head -c 20; exit "${PIPESTATUS[0]}"'
    words = [*COMMAND, "generate", "Tell a long story.", "--max-tokens", "8000"]
    done = subprocess.run(["bash", "-c", line, "bash", *words], capture_output=True, timeout=120, check=False)
    assert len(done.stdout) == 20
    assert done.stderr == b""
    assert done.returncode == 1


def test_status_tells_of_speculation(capsys: pytest.CaptureFixture[str]) -> None:
    usage = Usage(
        prompt_tokens=9,
        cached_tokens=0,
        completion_tokens=30,
        passes=12,
        drafted_by={"lookup": 40},
        accepted_by={"lookup": 18},
    )
    render.show_result(Result("text", (), "stop", usage, Timing(0.5, 2.0)), details=False)
    shown = capsys.readouterr().err
    assert "30 tokens, 15.0 tokens/s; prefill 0.50 s, decoding 2.00 s" in shown
    assert "2.50 tokens a pass, 18 of 40 guesses accepted" in shown
    assert shown.count("\n") == 1


def test_a_chat_reads_only_what_is_new(smollm2: Path) -> None:
    """Where a prompt found gives the bits of one that is read anew."""
    with ExitStack() as opened:
        llm = LocalResources("smollm2-135m", ModelValues(batch_invariant=True), opened).llm
        first = llm.generate(PROMPT, max_tokens=8, method="plain")
        turns = [
            {"role": "user", "content": PROMPT},
            {"role": "assistant", "content": first.text},
            {"role": "user", "content": "Go on."},
        ]
        usage = llm.generate(turns, max_tokens=2, method="plain").usage
    assert usage.cached_tokens >= first.usage.prompt_tokens


def test_what_was_read_is_kept_where_texts_stay_the_same_or_need_not(smollm2: Path) -> None:
    values = ModelValues(dtype="bf16", batch_invariant=False)
    for method, kept in (
        (None, False),
        (package.StandardRAG(), False),
        (package.StandardRAG(reuse="blocks"), True),
    ):
        with ExitStack() as opened:
            given = LocalResources("smollm2-135m", values, opened)
            if method is not None:
                given.check(method)
            assert bool(given.llm.prefixes.limit_bytes) is kept
