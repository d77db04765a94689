"""``specrag serve --background`` and the questions that it answers in a command's place."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from specrag.cli.remote import find_server
from specrag.serving.running import RunningServer, noted, running_servers
from tests.cli.shell import COMMAND, Result, specrag
from tests.cli.test_ask import FIGURES, INVARIANT, QUESTION
from tests.sample import build_sample

SECONDS = 120


@pytest.fixture
def home(smollm2: Path, model_home: Path, tmp_path: Path) -> Path:
    """A home of its own, so that other tests' servers are not found and not ended; with the same models."""
    folder = tmp_path / "home"
    folder.mkdir()
    for name in ("models", "locks"):
        (model_home / name).mkdir(exist_ok=True)
        (folder / name).symlink_to(model_home / name)
    return folder


@pytest.fixture
def kb(tmp_path: Path) -> str:
    return str(build_sample(tmp_path / "kb"))


@pytest.fixture
def ended(home: Path) -> Iterator[None]:
    """Whatever runs at the end of the test is ended."""
    yield
    run(home, "serve", "--stop")


def run(home: Path, *words: str, stdin: str = "") -> Result:
    return specrag(*words, stdin=stdin.encode(), SPECRAG_HOME=str(home))


def test_questions_are_answered_by_the_server(home: Path, kb: str, ended: None) -> None:
    asked = partial(run, home, "ask", QUESTION, "--kb", kb, *INVARIANT)
    alone = asked("--max-tokens", "24")
    started = run(home, "serve", "--background", "--kb", f"docs={kb}", "--batch-invariant", "--json")
    assert started.code == 0, started.err
    server = json.loads(started.out)
    log = home / "servers" / "background.log"
    answers = [
        asked("--max-tokens", "24"),
        asked("-o", "max_tokens=24", "-o", "k=2", "-o", "decoder=plain"),
        run(home, "ask", "--kb", kb, "--chat", *INVARIANT, stdin=f"{QUESTION}\nThanks!\nWhen was that?\n"),
        run(
            home, "ask", "Which colour has the flag of Mars?", "--kb", kb, "-o", "min_score=0.95", *INVARIANT
        ),
    ]
    assert [answer.code for answer in answers] == [0] * 4, answers[-1].err
    written = log.read_text()
    assert written.count('"event": "generation"') == 5, written
    first, second, chat, silent = answers
    assert first.out == alone.out
    assert FIGURES.search(re.sub(r"queue [\d.]+ s, ", "", first.err.splitlines()[-1]))
    assert len(second.out.partition("\n\n")[2].splitlines()) == 2
    assert chat.out.startswith(first.out.partition("\n\n")[0])
    assert "holds nothing about this question" in silent.out
    assert "note: the most similar passage" in silent.err
    refused = asked("-o", "temperature=1", "-o", "seed=-1", "-o", "top_k=9999999")
    assert (refused.code, refused.out) == (1, "")
    assert f"error: the server at {server['url']}" in refused.err
    assert run(home, "serve", "--stop").out.startswith(f"ended {server['url']}")
    assert run(home, "serve", "--stop").err == "no background server is running\n"


def test_what_cannot_start_says_why(home: Path, kb: str, ended: None) -> None:
    (home / "models").unlink()
    result = run(home, "serve", "--background", "--kb", kb, "--model", str(home / "none.gguf"))
    assert result.code == 1
    assert "the server has ended: error: " in result.err
    assert "none.gguf" in result.err


def test_a_server_that_nobody_asks_ends(home: Path, kb: str, ended: None) -> None:
    words = ["serve", "--kb", kb, "--port", "0", "--idle-seconds", "0.5"]
    environment = {**os.environ, "SPECRAG_HOME": str(home)}
    process = subprocess.run([*COMMAND, *words], env=environment, timeout=SECONDS, check=False)
    assert process.returncode == 0
    assert not list((home / "servers").glob("*.json"))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[RunningServer]:
    """A note of a server that is this process."""
    monkeypatch.setenv("SPECRAG_HOME", str(tmp_path))
    loading = {"dtype": "auto", "device": None, "adapter": None, "batch_invariant": None, "kv_dtype": "auto"}
    kbs = {"docs": str(tmp_path / "kb")}
    server = RunningServer(
        os.getpid(), "http://127.0.0.1:1", "own", "smollm2-135m", False, loading, kbs, True
    )
    with noted(server):
        yield server


def chosen(*pairs: str, method: str = "standard-rag") -> object:
    import typer

    from specrag.cli.values import choose

    return choose(typer.Context(typer.main.get_command(typer.Typer(callback=lambda: None))), method, pairs)


@pytest.mark.parametrize(
    ("model", "folder", "pairs", "found"),
    [
        ("smollm2-135m", "kb", (), True),
        ("smollm2-135m", "../{name}/kb", ("k=3", "temperature=0.5"), True),
        ("smollm2-135m", "other", (), False),
        ("qwen2.5-coder-1.5b", "kb", (), False),
        ("smollm2-135m", "kb", ("dtype=fp32",), False),
        ("smollm2-135m", "kb", ("log_probs=2",), False),
        ("smollm2-135m", "kb", ("rerank=x",), False),
    ],
)
def test_only_what_it_would_answer_alike(
    server: RunningServer, tmp_path: Path, model: str, folder: str, pairs: tuple[str, ...], found: bool
) -> None:
    kb = str(tmp_path / folder.format(name=tmp_path.name))
    assert (find_server(chosen(*pairs), kb, model) == server) is found  # type: ignore[arg-type]


def test_methods_with_more_than_passages_and_a_model_do_it_themselves(
    server: RunningServer, tmp_path: Path
) -> None:
    kb = str(tmp_path / "kb")
    assert find_server(chosen(method="ralmspec"), kb, "smollm2-135m") == server  # type: ignore[arg-type]
    for name in ("speculative-rag", "cascade"):
        assert find_server(chosen(method=name), kb, "smollm2-135m") is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pair", "found"),
    [
        ("drafter=lookup", True),
        ("tolerance=2", True),
        ("drafter=model:smollm2-135m", False),
        ("corpus=texts", False),
    ],
)
def test_what_a_server_was_not_started_with_is_opened_here(
    server: RunningServer, tmp_path: Path, pair: str, found: bool
) -> None:
    wanted = chosen(pair, method="adaptive")
    assert (find_server(wanted, str(tmp_path / "kb"), "smollm2-135m") == server) is found  # type: ignore[arg-type]


def test_the_note_of_a_dead_process_is_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPECRAG_HOME", str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    (tmp_path / "servers").mkdir()
    (tmp_path / "servers" / "1.json").write_text("{}")  # no note of ours
    with noted(RunningServer(process.pid, "http://127.0.0.1:1", "a", "a", True, {}, {}, True)):
        assert [server.pid for server in running_servers()] == [process.pid]
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert running_servers() == []
        assert not (tmp_path / "servers" / f"{process.pid}.json").exists()
