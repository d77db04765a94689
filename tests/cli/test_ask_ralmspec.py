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
INVARIANT = ("-o", "dtype=int8", "-o", "batch_invariant=true")
SHOWN = ("--max-tokens", "16", "--method", "ralmspec", "-o", "index=bm25")
FIGURES = re.compile(
    r"16 tokens, [\d.]+ tokens/s; (?:retrieval [\d.]+ s, )?prefill [\d.]+ s, decoding [\d.]+ s; "
    r"4 retrievals; (\d+) guessed right, (\d+) wrong; cut at the limit"
)


@pytest.fixture(scope="module")
def kb(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_sample(tmp_path_factory.mktemp("ask-ralmspec") / "kb"))


def test_ralmspec_answers_as_the_baseline_does(kb: str) -> None:
    words = ("ask", QUESTION, "--kb", kb, "--max-tokens", "16", "-o", "index=flat", "--json", *INVARIANT)
    baseline = specrag(*words, "--method", "sequential")
    assert (baseline.code, baseline.err) == (0, "")
    chosen = ("stride=os3", "max_match=none", "prefetch=5", "asynchronous=true", "decoder=prompt-lookup")
    speculative = specrag(*words, "--method", "ralmspec", *(word for one in chosen for word in ("-o", one)))
    assert (speculative.code, speculative.err) == (0, "")
    wanted, found = json.loads(baseline.out), json.loads(speculative.out)
    for name in ("question", "text", "finish_reason"):
        assert found[name] == wanted[name]
    assert [token["id"] for token in found["tokens"]] == [token["id"] for token in wanted["tokens"]]
    details = found["details"]
    assert details["chunks"] == wanted["details"]["chunks"]
    assert [source["title"] for source in found["sources"]] == [
        source["title"] for source in wanted["sources"]
    ]
    assert found["sources"][0]["score"] > 0
    assert len(details["chunks"]) == details["chunk_counts"]["kept"] == 4
    assert sum(round["stride"] for round in details["rounds"]) >= 3
    assert wanted["details"]["rounds"] == []
    assert details["seconds"]["total"] > details["seconds"]["generation"] > 0
    assert {span["activity"] for span in details["timeline"]} == {
        "encode",
        "look-up",
        "search",
        "prefill",
        "decode",
    }
    assert found["method"] == "ralmspec"
    assert (details["failure"], found["usage"]["completion_tokens"]) == (None, 16)


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
    session = Terminal("ask", QUESTION, "--kb", kb, *SHOWN, "-o", "early=true").end()
    assert session.code == 0
    screen = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", session.shown)
    text = shown.out.partition("\n\n[1]")[0]
    assert " ".join(text.split()) in " ".join(screen.split())


ITERATIVE = ("--method", "ralmspec")
REFUSED = [
    # words, exit code, what the line must name: field, value, remedy
    (("--method", "ralmspek"), 1, ("method", "'ralmspek'", "did you mean ralmspec?")),
    (("-o", "stride=3"), 1, ("-o stride", "'3'", "standard-rag takes decoder")),
    (("--method", "sequential", "-o", "asynchronous=true"), 1, ("-o asynchronous", "sequential takes")),
    ((*ITERATIVE, "-o", "stride=0"), 1, ("-o stride", "'0'", "from 1 to 16 or one of os3, cost-aware")),
    ((*ITERATIVE, "-o", "stride=os4"), 1, ("-o stride", "'os4'", "one of os3, cost-aware")),
    ((*ITERATIVE, "-o", "prefetch=0"), 1, ("-o prefetch", "'0'", "from 1 to 256")),
    ((*ITERATIVE, "-o", "prefetch=many"), 1, ("-o prefetch", "'many'", "a whole number")),
    ((*ITERATIVE, "--where", "title=Tungsten"), 1, ("where", "no passage satisfies it")),
    ((*ITERATIVE, "-o", "decoder=plane"), 1, ("-o decoder", "'plane'", "did you mean plain?")),
    ((*ITERATIVE, "-o", "drafter=lookup"), 1, ("-o drafter", "'lookup'", "ralmspec takes")),
    ((*ITERATIVE, "-o", "early=true"), 1, ("-o early", "on a terminal only")),
    ((*ITERATIVE, "--max-tokens", "0"), 1, ("--max-tokens", "0")),
    ((*ITERATIVE, "-o", "timeout=0"), 1, ("-o timeout", "'0'", "above 0")),
    ((*ITERATIVE, "-o", "index=flatt"), 1, ("-o index", "'flatt'", "one of flat")),
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
    monkeypatch.setattr("specrag.retrieval.encoder.encoder.load_encoder", load)
    assert frame.run(["ask", QUESTION, "--kb", kb, *words]) == code
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ")
    assert shown.err.count("\n") == 1
    assert [part for part in named if part not in shown.err] == [], shown.err
