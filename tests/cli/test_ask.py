"""``specrag ask`` as people and scripts use it: real processes, pipes and pseudo-terminals."""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import specrag as package
from specrag.cli import main as frame
from specrag.cli import render
from specrag.methods.citations import find_citations
from specrag.methods.standard_rag.result import Answer, AnswerStats
from specrag.request import ABSTENTION, Result, Source
from specrag.retrieval.passage import Passage
from tests.cli.shell import specrag
from tests.cli.test_generate import Terminal
from tests.sample import build_sample

QUESTION = "Who discovered radium?"
#: The default method's schedule follows the clock: two runs pack other passes.
INVARIANT = ("-o", "batch_invariant=true")
FIGURES = re.compile(
    r"(\d+) tokens?, [\d.]+ tokens/s; (rewrite [\d.]+ s, )?(retrieval [\d.]+ s, )?prefill [\d.]+ s, "
    r"decoding [\d.]+ s(; [\d.]+ tokens a pass, \d+ of \d+ guesses accepted)?(; cut at the limit)?"
)


@pytest.fixture(scope="module")
def kb(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_sample(tmp_path_factory.mktemp("ask") / "kb"))


@pytest.fixture(scope="module")
def expected(kb: str) -> Result:
    """What Python gives for the question of these tests."""
    with package.KnowledgeBase.open(kb) as base:
        return package.load("smollm2-135m", batch_invariant=True).generate(QUESTION, kb=base, max_tokens=24)


def test_answer_and_sources_on_one_stream_figures_on_the_other(kb: str, expected: Result) -> None:
    result = specrag("ask", QUESTION, "--kb", kb, "--max-tokens", "24", *INVARIANT)
    assert result.code == 0, result.err
    text, _, listed = result.out.partition("\n\n")
    assert text == expected.text
    lines = listed.splitlines()
    assert len(lines) == 5
    for line, source in zip(lines, expected.sources, strict=True):
        assert line.startswith(f"[{source.number}] {source.passage.title}  summaries.jsonl, line ")
        assert f"score {source.score:.3g}" in line
        assert line.endswith("  used") == source.cited
    assert any(source.cited for source in expected.sources)
    assert FIGURES.fullmatch(result.err.splitlines()[-1]), result.err


def test_json(kb: str, expected: Result) -> None:
    result = specrag("ask", QUESTION, "--kb", kb, "--max-tokens", "24", "--json", *INVARIANT)
    assert (result.code, result.err) == (0, "")
    found = json.loads(result.out)
    assert found["text"] == expected.text
    assert found["question"] == found["details"]["question"] == QUESTION
    assert [source["title"] for source in found["sources"]] == [s.passage.title for s in expected.sources]
    assert [source["cited"] for source in found["sources"]] == [s.cited for s in expected.sources]
    assert isinstance(expected.details, Answer)
    assert [citation["number"] for citation in found["details"]["citations"]] == [
        citation.number for citation in expected.details.citations.found
    ]
    assert found["details"]["citations"][0]["supported"] is True
    assert found["usage"]["completion_tokens"] == expected.usage.completion_tokens
    assert found["usage"]["seconds"]["retrieval"] > 0
    assert (found["model"], found["method"]) == ("smollm2-135m", "standard-rag")


def test_nothing_relevant(kb: str) -> None:
    result = specrag("ask", "How do I reset my router password?", "--kb", kb)
    assert result.code == 0
    assert result.out == f"{ABSTENTION}\n"
    note, figures = result.err.splitlines()
    assert "the most similar passage has a similarity of" in note
    assert figures.startswith("retrieval ")


def test_settings_reach_the_answer_and_the_question_may_come_by_a_pipe(kb: str) -> None:
    words: tuple[str, ...] = (
        "-o",
        "index=bm25",
        "-k",
        "2",
        "--where",
        "title=Tin,Bronze",
        "-o",
        "abstain=false",
    )
    words += ("--max-tokens", "3")
    result = specrag("ask", "--kb", kb, *words, "--system", "Be brief.", "--json", stdin=b"What is tin?\n")
    assert result.code == 0, result.err
    found = json.loads(result.out)
    assert found["question"] == "What is tin?"
    assert {source["title"] for source in found["sources"]} <= {"Tin", "Bronze"}
    assert len(found["sources"]) == 2
    assert not found["details"]["abstained"]
    assert found["usage"]["completion_tokens"] <= 3


def test_chat_understands_a_follow_up_and_survives_a_bad_question(kb: str) -> None:
    lines = f"\nWhich prizes did she win?\n{'why ' * 9000}\nWhat is tin?\n"
    result = specrag(
        "ask", "Who was Marie Curie?", "--kb", kb, "--chat", "--max-tokens", "16", stdin=lines.encode()
    )
    assert result.code == 0, result.err
    figures = [match for line in result.err.splitlines() if (match := FIGURES.fullmatch(line))]
    assert [bool(match[2]) for match in figures] == [False, True, True]
    assert result.err.count("error: question: ") == 1
    answers = re.findall(r"^(.+)\n\n\[1\] (.+?)  ", result.out, flags=re.M)
    assert len(answers) == 3
    assert [title for _, title in answers][:2] == ["Marie Curie", "Marie Curie"]


def test_chat_in_a_terminal_ends_with_the_input(kb: str) -> None:
    terminal = Terminal("ask", "--kb", kb, "--chat", "--max-tokens", "8")
    screen = ""
    # A key pressed before the prompt is there would be lost: the line editor empties the terminal when it starts.
    for key in (b"What is tin?\n", b"Thanks!\n", b"/sources\n", b"/sourcs\n", b"\x04"):
        while not screen.endswith("> "):
            screen += terminal.read(at_least=1)
        os.write(terminal._keyboard, key)
        screen += " "
    session = terminal.end()
    assert session.code == 0
    assert terminal.told_of_loading
    assert screen.count("decoding") == 1
    assert "You are welcome." in screen
    assert screen.count("summaries.jsonl, line ") == 10  # below the answer, and asked for
    assert "error: there is no command /sourcs; did you mean /sources?" in screen


def test_a_chat_answers_anyway_when_told_to(kb: str) -> None:
    asked = b"How do I reset my router password?\n/anyway\n/anyway\nWhat is tin?\n/anyway\n"
    result = specrag("ask", "--kb", kb, "--chat", "--max-tokens", "8", stdin=asked)
    assert result.code == 0, result.err
    first, second, third = (
        block.splitlines()[0] for block in re.split(r"\n(?=\S)", result.out) if "[" not in block[:1]
    )
    assert first == ABSTENTION
    assert ABSTENTION not in (second, third)
    assert "with abstain=false it is answered all the same" in result.err
    assert result.err.count("/anyway answers it all the same") == 1
    assert result.err.count("the last question has been answered") == 2


def test_interrupt_in_a_chat_stops_the_answer_and_at_the_prompt_leaves(kb: str) -> None:
    words = [
        "ask",
        "Who discovered radium?",
        "--kb",
        kb,
        "--chat",
        "--max-tokens",
        "4000",
        "--temperature",
        "3",
    ]
    terminal = Terminal(*words, *INVARIANT)  # without it a note may come before the answer
    terminal.read(at_least=60)
    terminal.press_ctrl_c()
    screen = ""
    for key in (b"/help\n", b"/clear\n"):
        while not screen.endswith("> "):
            screen += terminal.read(at_least=1)
        os.write(terminal._keyboard, key)
        screen += " "
    assert "stopped" in screen
    assert "/sources" in screen
    while not screen.endswith("> "):
        screen += terminal.read(at_least=1)
    time.sleep(0.5)  # the line editor has to wait for keys before one can interrupt it
    terminal.press_ctrl_c()
    session = terminal.end()
    assert session.code == 130
    assert "Traceback" not in session.screen


def test_interrupt_leaves_a_clean_terminal(kb: str) -> None:
    terminal = Terminal("ask", QUESTION, "--kb", kb, "--max-tokens", "4000", "--temperature", "3")
    shown = terminal.read(at_least=60)
    terminal.press_ctrl_c()
    session = terminal.end()
    assert session.code == 130
    _, _, rest = (shown + session.screen).partition("^C")  # the terminal's own echo of the key
    assert rest.endswith("\x1b[0m\x1b[?25h\r\n")  # colours and cursor as they were, on a line of their own
    assert "Traceback" not in rest
    assert "error" not in rest


def test_timeout_keeps_the_partial_text(kb: str) -> None:
    words = ("--max-tokens", "4000", "--temperature", "3", "-k", "1", "-o", "timeout=6")
    result = specrag("ask", QUESTION, "--kb", kb, *words)
    assert result.code == 1
    assert result.out.endswith("\n")
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1
    assert "deadline" in result.err


REFUSED = [
    # words, exit code, what the line must name: field, value, remedy
    (("-o", "index=flatt"), 1, ("-o index", "'flatt'", "one of flat, hnsw, bm25, hybrid")),
    (("--method", "plane"), 1, ("method", "'plane'", "did you mean plain?")),
    (("--method", "specultive-rag"), 1, ("--method", "sequential", "did you mean speculative-rag?")),
    (("--method", "rapid"), 1, ("--method", "'rapid'", "--context FILE")),
    (("-o", "indx=flat"), 1, ("-o indx", "'flat'", "did you mean index?")),
    (("-o", "index"), 1, ("-o index", "give a value behind it")),
    (("-o", "k=3", "-k", "4"), 1, ("-o k", "'3'", "given as a flag, too")),
    (("-o", "seed=1", "-o", "seed=2"), 1, ("-o seed", "'2'", "given twice")),
    (("-k", "0"), 1, ("k", "'0'", "from 1 to 100")),
    (("-k", "26"), 1, ("k", "26", "25 passages")),
    (("-k", "many"), 1, ("k", "'many'", "a whole number")),
    (("-o", "min_score=2"), 1, ("-o min_score", "'2'", "from -1 to 1")),
    (("-o", "min_score=0.5", "-o", "abstain=false"), 1, ("-o min_score", "0.5", "not both")),
    (("--where", "title"), 1, ("--where", "'title'", "FIELD=VALUE")),
    (("--where", "colour=red"), 1, ("where", "'colour'", "the fields are")),
    (("--temperature", "-1"), 1, ("--temperature", "'-1'", "a number from 0")),
    (("-o", "timeout=0"), 1, ("-o timeout", "'0'", "above 0")),
    (("--chat", "--json"), 1, ("--json", "leave out --chat")),
    (("--chat", "--file", "x"), 1, ("--file", "'x'", "leave out --file")),
    (("--file", "x"), 1, ("--file", "'x'", "not both")),
]


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """No model may be loaded."""

    def load(*_: object, **__: object) -> None:
        raise AssertionError("the model was touched")

    monkeypatch.setattr("specrag.language_model.load", load)
    monkeypatch.setattr("specrag.retrieval.encoder.encoder.load_encoder", load)


def _assert_one_line(code: int, out: str, err: str, named: tuple[str, ...]) -> None:
    assert code != 0
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err
    assert [part for part in named if part not in err] == [], err


@pytest.mark.parametrize(("words", "code", "named"), REFUSED, ids=lambda value: str(value)[:40])
def test_refused_before_the_model_is_touched(
    kb: str,
    unloaded: None,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    code: int,
    named: tuple[str, ...],
) -> None:
    assert frame.run(["ask", QUESTION, "--kb", kb, *words]) == code
    shown = capsys.readouterr()
    _assert_one_line(code, shown.out, shown.err, named)


def test_no_knowledge_base_no_question(
    kb: str, unloaded: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing, empty = str(tmp_path / "missing"), str(tmp_path / "empty")
    Path(empty).mkdir()
    refused = [
        ([QUESTION, "--kb", missing], ("knowledge base", missing, "specrag index")),
        ([QUESTION, "--kb", empty], ("knowledge base", empty, "specrag index")),
        ([QUESTION], ("--kb",)),
        (["", "--kb", kb], ("prompt", "''")),
    ]
    for words, named in refused:
        code = frame.run(["ask", *words])
        shown = capsys.readouterr()
        _assert_one_line(code, shown.out, shown.err, named)


def test_question_longer_than_the_context(kb: str) -> None:
    result = specrag("ask", "why " * 9000, "--kb", kb)
    _assert_one_line(result.code, result.out, result.err, ("question", "why why", "shorten the question"))


def _answer(text: str, *passages: Passage, **changes: Any) -> Answer:
    sources = [Source(number, passage, 0.5, 0.5, cited=True) for number, passage in enumerate(passages, 1)]
    found = Answer(
        text=text,
        sources=tuple(sources),
        question="?",
        abstained=False,
        least_similarity=None,
        citations=find_citations(text, [passage.text for passage in passages]),
        unheld=(),
        left_out=(),
        shortened=False,
        generation=None,
        stats=AnswerStats(0.0, 0.1, 0.0, 0.0, 0, 0),
    )
    return replace(found, **changes)


def test_a_second_passage_need_not_hold_what_the_first_one_has() -> None:
    text = "Leonardo painted the Mona Lisa, and it hangs in the Louvre. [1][2]"
    painter = Passage(0, "a.txt", "", "line 1", "Leonardo da Vinci painted the Mona Lisa in Florence.", {})
    museum = Passage(1, "a.txt", "", "line 2", "The Louvre is a museum.", {})
    assert [one.number for one in _answer(text, painter, museum).citations.unsupported] == [2]
    assert _answer(text, painter, museum).notes() == []
    (note,) = _answer(text.replace("[2]", ""), museum).notes()
    assert note.startswith("[1] holds little")


def test_notes_tell_what_a_reader_should_know(capsys: pytest.CaptureFixture[str]) -> None:
    passage = Passage(0, "a\x1b[31m.txt", "Copper", "line 1", "Copper is a soft metal.", {})
    text = "Gold conducts heat well [1]. Tin too [4]."
    answer = _answer(text, passage, unheld=("1898",), shortened=True)
    render.show_result(answer.result(), details=False)
    shown = capsys.readouterr()
    assert "\x1b[31m" not in shown.out  # a source's name says nothing to the terminal
    assert "[1] Copper" in shown.out
    assert "note: the answer cites [4], which is no source" in shown.err
    assert "note: in no cited passage: 1898" in shown.err
    assert "note: [1] holds little of what it is cited for: Gold conducts heat well." in shown.err
    assert "note: the best passage was shortened" in shown.err
