"""``specrag ask --method speculative-rag``, as people and scripts use it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from specrag.cli import main as frame
from specrag.cli.ask_speculative import Models
from tests.cli.shell import Result, specrag
from tests.sample import build_sample

QUESTION = "Who discovered radium?"
SPECULATIVE = ("--method", "speculative-rag")
SHORT = ("-m", "3", "-k", "2", "--passages", "4", "--max-tokens", "24")
FIGURES = re.compile(
    r"3 drafts, [\d.]+ s; retrieval [\d.]+ s, embedding [\d.]+ s, clustering [\d.]+ s, drafting [\d.]+ s, "
    r"verification [\d.]+ s; the drafter read [\d,]+ tokens and wrote \d+, the verifier read \d+"
)


@pytest.fixture(scope="module")
def kb(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_sample(tmp_path_factory.mktemp("ask-speculative") / "kb"))


@pytest.fixture(scope="module")
def shown(kb: str) -> Result:
    return specrag("ask", QUESTION, "--kb", kb, *SPECULATIVE, *SHORT, "--show-drafts", COLUMNS="80")


def test_answer_drafts_sources_and_figures(shown: Result) -> None:
    assert shown.code == 0, shown.err
    answer, table, sources = (
        part.strip("\n") for part in re.split(r"\n\s*\n", shown.out.strip("\n"), maxsplit=2)
    )
    lines = table.splitlines()
    assert lines[0].split() == [
        "#",
        "from",
        "answer,",
        "and",
        "its",
        "rationale",
        "drafter",
        "contain",
        "reflect",
        "score",
    ]
    rows = [line.split() for line in lines if re.match(r"\s\d  ", line)]
    assert sorted(row[0] for row in rows) == ["1", "2", "3"]
    scores = [float(row[-1]) for row in rows if re.fullmatch(r"-?\d+\.\d\d", row[-1])]
    assert scores == sorted(scores, reverse=True)
    assert rows[0][3] == answer.split()[0]
    assert max(len(line) for line in lines) <= 80
    assert re.findall(r"^\[(\d)\] ", sources, flags=re.MULTILINE) == ["1", "2", "3", "4"]
    assert sources.count("read for this answer") == 2
    assert FIGURES.fullmatch(shown.err.splitlines()[-1]), shown.err


def test_json_holds_everything(kb: str) -> None:
    done = specrag(
        "ask",
        "Marie Curie discovered radium.",
        *("--kb", kb, *SPECULATIVE, "--claim", "--drafts", "2", "-k", "1", "--passages", "3"),
        *(
            "--evidence",
            "both",
            "--without",
            "self-reflect",
            "--length-normalized",
            "--max-tokens",
            "24",
            "--json",
        ),
    )
    assert (done.code, done.err) == (0, "")
    found = json.loads(done.out)
    assert len(found["drafts"]) == 2
    best = next((draft for draft in found["drafts"] if draft["number"] == found["best"]), None)
    if best is None:
        assert found["fallback"]
    else:
        assert best["answer"] == found["answer"]
        assert best["scores"]["self_reflect"] is None
        part = best["measured"]["self_contain"]
        assert best["scores"]["self_contain"] == pytest.approx(part["log_prob"] / part["tokens"])
        assert part["tokens"] > 40  # the passage too
    assert found["scoring"]["evidence"] == "both"
    assert found["scoring"]["length_normalized"]
    assert found["sampling"]["encoder"] is None  # one passage a draft needs no clusters
    assert len(found["sources"]) == 3
    assert found["timing"]["total_seconds"] >= found["timing"]["drafting_seconds"] > 0
    assert found["usage"]["drafter_read_tokens"] < found["usage"]["drafter_prompt_tokens"]
    assert (found["drafter"], found["verifier"], found["method"]) == (
        "smollm2-135m",
        "smollm2-135m",
        "speculative-rag",
    )
    assert found["verifies_itself"]


@pytest.mark.parametrize(
    ("model", "adapter", "wanted"),
    [
        ("smollm2-135m", None, "smollm2-135m-drafter"),
        ("smollm2-135m", "none", None),
        ("smollm2-135m", "mine", "mine"),
        ("qwen2.5-coder-1.5b", None, None),
        ("http://localhost:1/v1#m", None, None),
    ],
)
def test_the_drafter_that_comes_with_specrag_is_the_default(
    model: str, adapter: str | None, wanted: str | None
) -> None:
    given = Path(adapter) if adapter else None
    models = Models(model, None, None, "bf16", None, given, False, "auto")
    assert (None if models.tuned is None else models.tuned.name) == wanted


REFUSED = [
    # words, exit code, what the line must name: field, value, remedy
    ((*SPECULATIVE, "-m", "0"), 1, ("m", "0", "from 1 upwards")),
    ((*SPECULATIVE, "-m", "3", "--drafts", "4"), 1, ("-m", "'3'", "not both")),
    ((*SPECULATIVE, "-k", "0"), 1, ("k", "0", "from 1 upwards")),
    ((*SPECULATIVE, "--strategy", "topics"), 1, ("strategy", "'topics'", "multi-perspective")),
    ((*SPECULATIVE, "--evidence", "all"), 1, ("evidence", "'all'", "rationale, passages, both")),
    ((*SPECULATIVE, "--without", "length"), 1, ("--without", "'length'", "self-contain")),
    ((*SPECULATIVE, "--option", "A"), 1, ("--option", "'A'", "A=Lyon")),
    ((*SPECULATIVE, "--option", "A=x", "--claim"), 1, ("--claim", "not both")),
    ((*SPECULATIVE, "--chat"), 1, ("--chat", "leave it out")),
    ((*SPECULATIVE, "--stride", "3"), 1, ("--stride", "'3'", "leave it out")),
    ((*SPECULATIVE, "--decoder", "plane"), 1, ("method", "'plane'", "did you mean plain?")),
    (
        (*SPECULATIVE, "--drafter", "http://localhost:1/v1#m", "--decoder", "respec"),
        1,
        ("--decoder", "an endpoint"),
    ),
    ((*SPECULATIVE, "--drafter", "http://localhost:1/v1#m"), 1, ("http://localhost:1",)),
    ((*SPECULATIVE, "--passages", "0"), 1, ("passages", "0", "from 1 upwards")),
    ((*SPECULATIVE, "--max-tokens", "1"), 1, ("rationale_tokens", "1", "no answer would fit")),
    (("--show-drafts",), 1, ("--show-drafts", "only --method speculative-rag")),
    (("--verifier", "smollm2-135m"), 1, ("--verifier", "only --method speculative-rag")),
]


@pytest.mark.parametrize(("words", "code", "named"), REFUSED, ids=lambda value: str(value)[:50])
def test_refused_before_a_model_is_touched(
    kb: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    code: int,
    named: tuple[str, ...],
) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("a model was touched")

    monkeypatch.setattr("specrag.language_model.load", load)
    monkeypatch.setattr("specrag.retrieval.encoder.load_encoder", load)
    assert frame.run(["ask", QUESTION, "--kb", kb, *words]) == code
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
    for part in named:
        assert part in said.err
