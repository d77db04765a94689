"""``specrag ask`` with a retrieval every few tokens, as people and scripts use it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from specrag.cli import main as frame
from tests.cli.shell import Result, specrag
from tests.cli.test_generate import Terminal
from tests.sample import build_sample

QUESTION = "Compare Marie Curie and copper: who discovered radium, and which sea does the Danube reach?"
#: Equality rests on layers that do not depend on what else is in a pass.
INVARIANT = ("--dtype", "int8", "--batch-invariant")
SHOWN = ("--max-tokens", "16", "--method", "ralmspec", "--index", "bm25")
FIGURES = re.compile(
    r"16 tokens, [\d.]+ tokens/s; 4 retrievals; (\d+) guessed right, (\d+) wrong; "
    r"retrieval [\d.]+ s, prefill [\d.]+ s, decoding [\d.]+ s; cut at the limit"
)


@pytest.fixture(scope="module")
def kb(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_sample(tmp_path_factory.mktemp("ask-ralmspec") / "kb"))


def test_ralmspec_answers_as_the_baseline_does(kb: str) -> None:
    words = ("ask", QUESTION, "--kb", kb, "--max-tokens", "16", "--index", "flat", "--json", *INVARIANT)
    baseline = specrag(*words, "--method", "sequential-kv-reuse")
    assert (baseline.code, baseline.err) == (0, "")
    chosen = (
        "--stride",
        "os3",
        "--uncapped",
        "--prefetch",
        "5",
        "--asynchronous",
        "--decoder",
        "prompt-lookup",
    )
    speculative = specrag(*words, "--method", "ralmspec", *chosen)
    assert (speculative.code, speculative.err) == (0, "")
    wanted, found = json.loads(baseline.out), json.loads(speculative.out)
    for name in ("question", "answer", "tokens", "finish_reason", "chunks"):
        assert found[name] == wanted[name]
    assert [source["title"] for source in found["sources"]] == [
        source["title"] for source in wanted["sources"]
    ]
    assert found["sources"][0]["score"] > 0
    assert len(found["chunks"]) == found["chunk_counts"]["kept"] == 4
    assert sum(round["stride"] for round in found["rounds"]) >= 3
    assert wanted["rounds"] == []
    assert found["timing"]["total_seconds"] > found["timing"]["generation_seconds"] > 0
    assert {span["activity"] for span in found["timeline"]} == {
        "encode",
        "look-up",
        "search",
        "prefill",
        "decode",
    }
    assert (found["method"], found["decoder"], found["index"]) == ("ralmspec", "prompt-lookup", "flat")
    assert (found["failure"], found["usage"]["completion_tokens"]) == (None, 16)


@pytest.fixture(scope="module")
def shown(kb: str) -> Result:
    """What is shown to a pipe."""
    return specrag("ask", QUESTION, "--kb", kb, *SHOWN)


def test_answer_sources_and_figures(shown: Result) -> None:
    assert shown.code == 0, shown.err
    text, _, listed = shown.out.partition("\n\n[1]")
    assert text.strip()
    assert "summaries.jsonl, line " in listed
    assert FIGURES.fullmatch(shown.err.splitlines()[-1]), shown.err


def test_text_is_shown_early_on_a_terminal(kb: str, shown: Result) -> None:
    """Redrawn as it grows and as it is taken back; what stands there at the end is the answer."""
    session = Terminal("ask", QUESTION, "--kb", kb, *SHOWN, "--early").end()
    assert session.code == 0
    screen = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", session.screen)
    text = shown.out.partition("\n\n[1]")[0]
    assert " ".join(text.split()) in " ".join(screen.split())


ITERATIVE = ("--method", "ralmspec")
REFUSED = [
    # words, exit code, what the line must name: field, value, remedy
    (("--method", "ralmspek"), 1, ("method", "'ralmspek'", "did you mean ralmspec?")),
    (("--stride", "3"), 1, ("--stride", "'3'", "only --method ralmspec")),
    (("--method", "respec", "--prefetch", "3"), 1, ("--prefetch", "3", "only --method ralmspec")),
    (("--method", "sequential", "--asynchronous"), 1, ("--asynchronous", "only --method ralmspec")),
    (("--decoder", "respec"), 1, ("--decoder", "'respec'", "name it as --method")),
    ((*ITERATIVE, "--stride", "0"), 1, ("--stride", "'0'", "at least 1, os3 or cost-aware")),
    ((*ITERATIVE, "--stride", "os4"), 1, ("--stride", "'os4'", "os3 or cost-aware")),
    ((*ITERATIVE, "--prefetch", "0"), 1, ("prefetch", "0", "from 1 to 25")),
    ((*ITERATIVE, "--prefetch", "26"), 1, ("prefetch", "26", "25 passages")),
    ((*ITERATIVE, "--prefetch", "many"), 2, ("--prefetch", "'many'", "give an integer")),
    ((*ITERATIVE, "--prefetch", "5", "--where", "title=Tin"), 1, ("prefetch", "5", "1 passage")),
    ((*ITERATIVE, "--where", "title=Tungsten"), 1, ("where", "no passage satisfies it")),
    ((*ITERATIVE, "--uncapped"), 1, ("--uncapped", "--stride os3")),
    ((*ITERATIVE, "--decoder", "plane"), 1, ("method", "'plane'", "did you mean plain?")),
    ((*ITERATIVE, "--drafter", "lookup"), 1, ("--drafter", "'lookup'", "only --method respec")),
    ((*ITERATIVE, "--early"), 1, ("--early", "on a terminal only")),
    ((*ITERATIVE, "-k", "3"), 1, ("-k", "3", "leave it out")),
    ((*ITERATIVE, "--chat"), 1, ("--chat", "leave it out")),
    ((*ITERATIVE, "--rerank", "x"), 1, ("--rerank", "'x'", "leave it out")),
    ((*ITERATIVE, "--no-abstain"), 1, ("--no-abstain", "leave it out")),
    ((*ITERATIVE, "--min-score", "0.1"), 1, ("--min-score", "0.1", "leave it out")),
    ((*ITERATIVE, "--max-tokens", "0"), 1, ("--max-tokens", "0")),
    ((*ITERATIVE, "--timeout", "0"), 1, ("timeout", "0", "more than 0")),
    ((*ITERATIVE, "--index", "flatt"), 1, ("index", "'flatt'", "did you mean flat?")),
]


@pytest.mark.parametrize(("words", "code", "named"), REFUSED, ids=lambda value: str(value)[:50])
def test_refused_before_the_model_is_touched(
    kb: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    code: int,
    named: tuple[str, ...],
) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("the model was touched")

    monkeypatch.setattr("specrag.language_model.load", load)
    monkeypatch.setattr("specrag.retrieval.encoder.load_encoder", load)
    assert frame.run(["ask", QUESTION, "--kb", kb, *words]) == code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ")
    assert shown.err.count("\n") == 1
    assert [part for part in named if part not in shown.err] == [], shown.err
