"""``specrag ask --context`` as people and scripts use it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli.shell import specrag
from tests.retrieval.sample_files import pdf

PAGES = (
    "Tides are caused by the Moon.\nThey rise and fall twice a day on most coasts.",
    "The harbour of Lindau was built in 1856.\nIts lighthouse is 33 metres high.",
    "Coffee came to Vienna in 1683.\nIt was served in houses with newspapers.",
)
QUESTION = "How high is the lighthouse of Lindau?"
FIGURES = re.compile(
    r"\d+ tokens?, [\d.]+ tokens/s; ((retrieval|tokenizing|prefix|drafter prefill) [\d.]+ s, )*"
    r"prefill [\d.]+ s, decoding [\d.]+ s; [\d,]+ tokens read(, [\d,]+ of them known before)?"
    r"(; [\d.]+ tokens a pass, \d+ of \d+ guesses accepted)?(; cut at the limit)?"
)


@pytest.fixture(scope="module")
def report(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "report.pdf"
    path.write_bytes(pdf(*PAGES, title="Annual report"))
    return path


def test_answer_chunks_and_figures_and_the_second_question_reads_little(report: Path, tmp_path: Path) -> None:
    # The cost-aware length of a guess follows the clock, so that the two runs pack other passes: equal bits whatever is
    # in a pass is what makes their answers comparable. With a share in the text the drafter is always asked.
    words = (
        *("ask", QUESTION, "--context", str(report), "--method", "rapid", "-o", "retrieval_tokens=40"),
        *("-o", "eta=5", "--temperature", "0.1", "-o", "schedule=cost-aware"),
        *("--max-tokens", "16", "-o", f"keep_prefix={tmp_path / 'kept'}", "-o", "batch_invariant=true"),
    )
    first = specrag(*words)
    assert first.code == 0, first.err
    text, _, listed = first.out.partition("\n\nthe drafter read ")
    assert text.strip()
    lines = listed.splitlines()
    assert re.fullmatch(r"1 of 3 chunks, \d+ of \d+ tokens:", lines[0])
    assert re.fullmatch(r"Annual report  report\.pdf, page 2  score 0\.\d\d", lines[1])
    assert FIGURES.fullmatch(first.err.strip()), first.err
    assert "known before" not in first.err
    second = specrag(*words, "--json")
    assert (second.code, second.err) == (0, "")
    found = json.loads(second.out)
    assert found["text"] == text.strip()
    details = found["details"]
    assert (found["method"], details["fallback"], details["decoded_by"]) == ("rapid", "", "rapid")
    assert [(chunk["place"], chunk["source"]) for chunk in details["chunks"]] == [("page 2", "report.pdf")]
    assert "33 metres" in details["chunks"][0]["text"]
    usage, seconds = found["usage"], found["usage"]["seconds"]
    assert usage["prompt_tokens"] - usage["cached_tokens"] < 40
    assert usage["cached_tokens"] > 60
    assert 0 < details["drafter_tokens"] < usage["prompt_tokens"]
    for name in ("retrieval", "prefill", "drafter_prefill", "decode"):
        assert seconds[name] > 0
    assert 0 < details["memory"]["estimated_bytes"] < details["memory"]["peak_bytes"]
    assert found["model"] == "smollm2-135m"


def test_a_chat_reads_the_documents_once(report: Path) -> None:
    words = ("ask", "--chat", "--context", str(report), "--max-tokens", "4", QUESTION)
    result = specrag(*words, stdin=b"And when was the harbour built?\n\n")
    assert result.code == 0, result.err
    first, second = result.err.strip().splitlines()
    assert "known before" not in first
    known = re.search(r"([\d,]+) tokens read, ([\d,]+) of them known before", second)
    assert known is not None
    assert int(known[2]) > 60
    assert len([line for line in result.out.splitlines() if line.strip()]) >= 2


def test_a_part_that_is_everything_is_said(smollm2: Path, tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text(PAGES[1])
    result = specrag(
        *("ask", QUESTION, "--context", str(tmp_path / "note.txt"), "--method", "rapid", "--max-tokens", "4")
    )
    assert result.code == 0, result.err
    assert result.err.startswith("note: the relevant part is the whole context")
    assert "the drafter read" not in result.out


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--context", "PICTURES"), ("--context", "pictures.pdf", "PDF without text", "OCR")),
        (("--context", "REPORT", "--kb", "x"), ("--context", "not both")),
        (("--context", "REPORT", "-o", "eta=5"), ("-o eta", "'5'", "long-context takes")),
        (("--context", "REPORT", "--method", "rapid", "-o", "eta=-1"), ("-o eta", "'-1'", "from 0 to 100")),
        (("--context", "REPORT", "-o", "top_p=3"), ("-o top_p: '3'",)),
        (("--context", "REPORT", "--max-tokens", "0"), ("--max-tokens: '0'",)),
        (("--context", "REPORT", "--method", "ralmspec"), ("--method", "ralmspec", "--kb")),
        (("--method", "rapid"), ("--method", "rapid", "--context FILE")),
    ],
)
def test_what_cannot_be_used_is_said_before_the_model_is_loaded(
    report: Path, tmp_path: Path, words: tuple[str, ...], named: tuple[str, ...]
) -> None:
    pictures = tmp_path / "pictures.pdf"
    pictures.write_bytes(pdf("", drawing=True))
    places = {"REPORT": str(report), "PICTURES": str(pictures)}
    # A model that is not there would be named first if it were looked for.
    result = specrag("ask", QUESTION, "--model", "no-such-model", *(places.get(word, word) for word in words))
    assert result.code == 1
    assert result.out == ""
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1
    assert [part for part in named if part not in result.err] == [], result.err


def test_what_is_too_long_is_told_in_options(report: Path) -> None:
    words = ("ask", QUESTION, "--context", str(report), "--max-tokens", "8180", "--method", "plain")
    result = specrag(*words)
    assert result.code == 1
    assert result.err.startswith("error: --context: ")
    assert "(-o truncate_middle=true)" in result.err
    assert "(--method long-context, -o read=part)" in result.err


def test_a_drafter_that_was_not_asked_is_said(report: Path) -> None:
    words = ("ask", QUESTION, "--context", str(report), "--method", "rapid", "-o", "retrieval_tokens=40")
    result = specrag(*words, "--max-tokens", "1")
    assert result.code == 0, result.err
    assert "the drafter was never asked; it would have read 1 of 3 chunks" in result.out
    assert "drafter prefill" not in result.err


def test_a_share_of_the_drafter_needs_a_temperature(report: Path) -> None:
    result = specrag("ask", QUESTION, "--context", str(report), "--method", "rapid", "-o", "eta=5")
    assert result.code == 1
    assert result.err.startswith("error: -o eta: 5.0 ")
    assert "raise the temperature" in result.err
