"""``specrag ask --method speculative-rag``, as people and scripts use it."""

from __future__ import annotations

import json
import re
from contextlib import ExitStack
from pathlib import Path

import pytest

from specrag.cli import main as frame
from specrag.cli.resources import LocalResources
from specrag.cli.values import ModelValues
from tests.cli.shell import Result, specrag
from tests.sample import build_sample

QUESTION = "Who discovered radium?"
SPECULATIVE = ("--method", "speculative-rag")
SHORT = (
    "-o",
    "drafts=3",
    "-o",
    "passages_per_draft=2",
    "-k",
    "4",
    "-o",
    "draft_tokens=24",
    "-o",
    "form=paper",
)
FIGURES = re.compile(
    r"\d+ tokens, [\d.]+ tokens/s; ((retrieval|embedding|clustering|verification) [\d.]+ s, )+decoding [\d.]+ s; "
    r"3 drafts, [\d.]+ s; the drafter read [\d,]+ tokens and wrote \d+, the verifier read \d+"
)


@pytest.fixture(scope="module")
def kb(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_sample(tmp_path_factory.mktemp("ask-speculative") / "kb"))


@pytest.fixture(scope="module")
def shown(kb: str) -> Result:
    return specrag("ask", QUESTION, "--kb", kb, *SPECULATIVE, *SHORT, "--details", COLUMNS="80")


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
    assert sources.count("  used") == 2
    assert FIGURES.fullmatch(shown.err.splitlines()[-1]), shown.err


def test_a_sentence_with_its_citation_is_the_default(kb: str) -> None:
    done = specrag("ask", QUESTION, "--kb", kb, *SPECULATIVE, "-k", "4", "-o", "drafts=2", "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    details = found["details"]
    cited = [source["number"] for source in found["sources"] if source["cited"]]
    assert cited
    assert all(f"[{number}]" in found["text"] for number in cited)
    assert details["sampling"]["strategy"] == "ranked"
    assert [draft["sources"] for draft in details["drafts"]] == [[1, 2], [1, 3]]
    assert (details["scoring"]["evidence"], details["scoring"]["length_normalized"]) == (
        "best-passages",
        True,
    )
    best = details["drafts"][details["best"] - 1]["scores"]
    assert (best["draft"], best["self_reflect"]) == (None, None)
    assert best["total"] == best["self_contain"]


def test_json_holds_everything(kb: str) -> None:
    own: tuple[str, ...] = (
        "claim=true",
        "drafts=2",
        "passages_per_draft=1",
        "evidence=both",
        "without=self-reflect",
    )
    own += ("length_normalized=true", "draft_tokens=24")
    words = [word for one in own for word in ("-o", one)]
    done = specrag(
        "ask", "Marie Curie discovered radium.", "--kb", kb, *SPECULATIVE, "-k", "3", *words, "--json"
    )
    assert (done.code, done.err) == (0, "")
    found = json.loads(done.out)
    details = found["details"]
    assert len(details["drafts"]) == 2
    best = next((draft for draft in details["drafts"] if draft["number"] == details["best"]), None)
    if best is None:
        assert details["fallback"]
    else:
        assert best["answer"] == found["text"]
        assert best["scores"]["self_reflect"] is None
        part = best["measured"]["self_contain"]
        assert best["scores"]["self_contain"] == pytest.approx(part["log_prob"] / part["tokens"])
        assert part["tokens"] > 40  # the passage too
    assert details["scoring"]["evidence"] == "both"
    assert details["scoring"]["length_normalized"]
    assert details["sampling"]["encoder"] is None  # one passage a draft needs no clusters
    assert len(found["sources"]) == 3
    assert details["seconds"]["total"] >= details["seconds"]["drafting"] > 0
    roles = details["tokens_by_role"]
    assert roles["drafter_read_tokens"] < roles["drafter_prompt_tokens"]
    assert (details["drafter"], details["verifier"], found["method"]) == (
        "smollm2-135m",
        "smollm2-135m",
        "speculative-rag",
    )
    assert details["verifies_itself"]


@pytest.mark.parametrize(
    ("model", "adapter", "wanted"),
    [
        ("smollm2-135m", None, "smollm2-135m-drafter"),
        ("smollm2-135m", "plain", None),
        ("smollm2-135m", "mine", "mine"),
        ("qwen2.5-coder-1.5b", None, "smollm2-135m-drafter"),
    ],
)
def test_the_drafter_that_comes_with_specrag_is_the_default(
    monkeypatch: pytest.MonkeyPatch, model: str, adapter: str | None, wanted: str | None
) -> None:
    loaded: list[str | None] = []

    def load(name: str, *, adapter: str | Path | None, **_: object) -> None:
        assert name == "smollm2-135m"  # which drafts for a larger model, too
        loaded.append(None if adapter is None else Path(adapter).name)
        raise LookupError

    monkeypatch.setattr("specrag.language_model.load", load)
    with ExitStack() as opened, pytest.raises(LookupError):
        LocalResources(model, ModelValues(), opened).writer(None, adapter)
    assert loaded == [wanted]


REFUSED = [
    # words, exit code, what the line must name: field, value, remedy
    ((*SPECULATIVE, "-o", "drafts=0"), 1, ("-o drafts", "'0'", "from 1 to 16")),
    ((*SPECULATIVE, "-o", "passages_per_draft=0"), 1, ("-o passages_per_draft", "'0'", "from 1 to 8")),
    ((*SPECULATIVE, "-o", "strategy=topics"), 1, ("-o strategy", "'topics'", "multi-perspective")),
    ((*SPECULATIVE, "-o", "evidence=all"), 1, ("-o evidence", "'all'", "rationale, passages, both")),
    ((*SPECULATIVE, "-o", "without=length"), 1, ("-o without", "length", "self-contain")),
    ((*SPECULATIVE, "-o", "choices=A"), 1, ("-o choices", "'A'", "A=Lyon")),
    ((*SPECULATIVE, "-o", "choices=A=x", "-o", "claim=true"), 1, ("-o claim", "not both")),
    ((*SPECULATIVE, "-o", "stride=3"), 1, ("-o stride", "'3'", "speculative-rag takes")),
    ((*SPECULATIVE, "-o", "draft_tokens=1"), 1, ("-o draft_tokens", "'1'", "from 16 to 512")),
    (
        (*SPECULATIVE, "-o", "drafter=http://localhost:1/v1#m", "-o", "decoder=respec"),
        1,
        ("-o decoder", "an endpoint"),
    ),
    ((*SPECULATIVE, "-o", "drafter=http://localhost:1/v1#m", "-o", "verifier=http://localhost:1/v1#m"), 1,
     ("http://localhost:1",)),
    (("-o", "verifier=smollm2-135m"), 1, ("-o verifier", "standard-rag takes")),
]  # fmt: skip


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
    monkeypatch.setattr("specrag.retrieval.encoder.encoder.load_encoder", load)
    assert frame.run(["ask", QUESTION, "--kb", kb, *words]) == code
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
    for part in named:
        assert part in said.err
