"""Defaults from a file: which file, what wins over them, what is refused, and what ``specrag config`` shows."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import typer

from specrag.cli import configuration, values
from specrag.cli import main as frame
from specrag.cli.values import Chosen


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, and no file of the user's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "users"))
    monkeypatch.delenv("SPECRAG_CONFIG", raising=False)
    return tmp_path


def write(text: str, name: str = "specrag.toml") -> None:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(text)


def line_of(monkeypatch: pytest.MonkeyPatch, *words: str) -> Chosen:
    """What a command makes of a line; it goes no farther."""
    found: list[Chosen] = []
    choose = values.choose

    def look(*given: Any) -> Chosen:
        found.append(choose(*given))
        raise typer.Exit

    with monkeypatch.context() as patch:
        patch.setattr(values, "choose", look)
        assert frame.run(words) == 0
    return found[0]


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert frame.run(words) in (1, 2)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    return said


def test_a_table_a_command_and_one_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    write(
        "[default]\nmax-tokens = 9\ntemperature = 0.5\nk = 3\n[generate]\nmax-tokens = 7\n[ask]\nmethod = 'ralmspec'\n"
    )
    generated = line_of(monkeypatch, "generate", "x")
    assert (generated.generation.max_tokens, generated.generation.temperature) == (7, 0.5)
    asked = line_of(monkeypatch, "ask", "x", "--kb", "kb")
    assert (asked.method.name, asked.generation.max_tokens, asked.search.k) == ("ralmspec", 9, 3)


def test_what_is_typed_wins_by_flag_or_option(monkeypatch: pytest.MonkeyPatch) -> None:
    write(
        "[generate]\nmax-tokens = 7\noption = { seed = 3, top_p = 0.5, temperature = 0.7, stop = ['a', 'b'] }\n"
    )
    usual = line_of(monkeypatch, "generate", "x").generation
    assert (usual.max_tokens, usual.seed, usual.top_p, usual.stop) == (7, 3, 0.5, ("a", "b"))
    typed = line_of(
        monkeypatch, "generate", "x", "-o", "max_tokens=5", "--temperature", "0.1", "-o", "seed=4"
    ).generation
    assert (typed.max_tokens, typed.temperature, typed.seed, typed.top_p) == (5, 0.1, 4, 0.5)
    with pytest.raises(AssertionError):  # as ever: what is typed twice is refused
        line_of(monkeypatch, "generate", "x", "--temperature", "0.1", "-o", "temperature=0.2")


def test_options_of_another_method_are_passed_over_and_of_none_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write("[ask]\nmethod = 'ralmspec'\noption = { stride = 3 }\n")
    assert line_of(monkeypatch, "ask", "x", "--kb", "kb").method.options.stride == 3  # type: ignore[attr-defined]
    assert line_of(monkeypatch, "ask", "x", "--kb", "kb", "-m", "plain").method.name == "plain"
    write("[ask]\noption = { strid = 3 }\n")
    said = refused(capsys, "ask", "x", "--kb", "kb", "-m", "ralmspec")
    assert said.startswith("error: specrag.toml: -o strid: ")
    assert "did you mean stride?" in said


def test_the_nearest_file_is_taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert configuration.find_file() is None
    write("", "users/specrag/config.toml")
    assert configuration.find_file() == folder / "users" / "specrag" / "config.toml"
    write("", "named.toml")
    monkeypatch.setenv("SPECRAG_CONFIG", "named.toml")
    assert configuration.find_file() == Path("named.toml")
    write("")
    assert configuration.find_file() == Path("specrag.toml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[genrate]\nraw = true", "specrag.toml: [genrate]: .* did you mean generate?"),
        ("[generate]\nmax-token = 5", "specrag.toml: [generate]: 'max-token' .* did you mean max-tokens?"),
        ("[default]\nmodle = 'x'", "specrag.toml: [default]: 'modle' .* did you mean model?"),
        ("[serve]\nmax_queues = 7", "specrag.toml: [serve]: 'max_queues' .* did you mean max-queue?"),
        ("[models.lst]\njson = true", "specrag.toml: [models.lst]: .* did you mean list?"),
        ("[generate]\nraw = 'yes'", "specrag.toml: [generate] raw: 'yes' .* give true or false"),
        ("[generate]\nmodel = ['a']", "specrag.toml: [generate] model: .* give a single text or number"),
        ("model = 'x'", "specrag.toml: model: 'x' .* put it into a table, [default]"),
        ("[generate", "specrag.toml: .* it is no TOML"),
        ("[search]\nk = 'a'", "'-k': 'a' .* give an integer such as 7 (from specrag.toml)"),
    ],
)
def test_what_cannot_be_used_is_named(text: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    write(text)
    found = refused(capsys, "search", "x", "--kb", "nowhere")
    for part in said.split(" .* "):
        assert part in found


def test_a_variable_that_names_no_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPECRAG_CONFIG", "nowhere.toml")
    assert "SPECRAG_CONFIG: 'nowhere.toml' is not usable: there is no such file" in refused(capsys, "config")


def test_a_typed_context_or_table_takes_the_place_of_the_files_kb(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write("[default]\nkb = 'kb'\n")
    assert line_of(monkeypatch, "ask", "x", "--context", "f.txt").method.name == "long-context"
    assert line_of(monkeypatch, "ask", "x").method.name == "standard-rag"
    monkeypatch.delenv("SPECRAG_PGVECTOR_URL", raising=False)
    assert "not both" not in refused(capsys, "search", "x", "--table", "t")


def test_serve_takes_flags_then_the_environment_then_the_file(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    pytest.importorskip("pydantic_settings")
    from specrag.serving import launch

    served: list[Any] = []
    monkeypatch.setattr(launch, "serve", served.append)
    monkeypatch.setattr("specrag.cli.serve.check_settings", lambda _: None)
    write(
        "[serve]\nport = 9001\nhost = 'localhost'\nmax-queue = 7\nmax_jobs = 5\n"
        "kb = ['kb', 'b=other']\nkv-dtype = 'int8'\n"
    )
    monkeypatch.setenv("SPECRAG_SERVE_PORT", "9002")
    assert frame.run(["serve"]) == 0
    assert frame.run(["serve", "--port", "9003", "--max-queue", "8", "--kb", "third"]) == 0
    first, second = served
    assert (first.port, first.host, first.max_queue, first.max_jobs) == (9002, "localhost", 7, 5)
    assert (first.kbs, first.kv_dtype) == ({"kb": Path("kb"), "b": Path("other")}, "int8")
    assert (second.port, second.max_queue, second.max_jobs, second.kbs) == (
        9003,
        8,
        5,
        {"third": Path("third")},
    )


def test_config_shows_what_holds_and_whence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in os.environ if name.startswith("SPECRAG_")]:
        monkeypatch.delenv(name)
    write(
        "[ask]\nk = 3\noption = { seed = 1 }\n[train.eagle]\nout = 'head'\n"
        "[serve]\napi_key = 'a secret of the server'\n"
    )
    monkeypatch.setenv("SPECRAG_PGVECTOR_URL", "postgresql://me:word@host/db")
    assert frame.run(["config"]) == 0
    shown = capsys.readouterr().out
    assert [line.split() for line in shown.splitlines()] == [
        ["specrag.toml", "[ask]", "k", "=", "3"],
        ["specrag.toml", "[ask]", "option", "=", '{"seed":', "1}"],
        ["specrag.toml", "[train.eagle]", "out", "=", "head"],
        ["specrag.toml", "[serve]", "api_key", "=", "(not", "shown)"],
        ["environment", "SPECRAG_PGVECTOR_URL", "=", "postgresql://me:***@host/db"],
    ]
    assert frame.run(["config", "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert described["file"] == "specrag.toml"
    assert described["values"][0] == {"from": "specrag.toml [ask]", "key": "k", "value": "3"}
