"""``specrag bench longcontext``: its rows, its figures, and a short run with the real model."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.longcontext import data
from benchmarks.longcontext import memory as longcontext_memory
from benchmarks.longcontext import simulated as longcontext_simulated
from benchmarks.longcontext.figures import Figures, pictures
from benchmarks.longcontext.labels import ETAS, LC, LOSSLESS, METHODS, NAIVE, RAG, SMALL, with_eta
from benchmarks.longcontext.subjects import Subjects
from specrag.bench.data import find_file, load_long_bench, load_text
from specrag.bench.measurement import check_method, from_json_lines
from specrag.bench.records import Outcome, Record, RecordKey
from specrag.bench.summary import summarise
from specrag.cli.main import app
from specrag.methods.rapid.decoder import RapidDecoder
from tests.processor import PACKED_BF16


def words(text: str) -> list[int]:
    return [len(word) for word in text.split()]


def test_made_up_questions_can_be_answered_and_are_the_same_again() -> None:
    for first, second in (
        (data.needles(None, words, 300, 3), data.needles(None, words, 300, 3)),
        (data.key_values(words, 100, 3), data.key_values(words, 100, 3)),
    ):
        rows = list(first)
        assert rows == list(second)
        assert len({row.name for row in rows}) == len({row.answers for row in rows}) == 3
        for row in rows:
            assert row.document.count(row.answers[0]) == 1
            assert row.right(f"It is {row.answers[0]}.")
            assert not row.right("It is 5.")
    (needle,) = data.needles(None, words, 300, 1)
    assert 270 <= len(words(needle.document)) < 330


def test_a_prompt_is_split_in_front_of_its_question() -> None:
    text = "A report.\n\n" + "Much is told here. " * 200 + "\n\nQuestion: Who?\n\nAnswer:"
    document, question = data.split_question(text)
    assert question == "Question: Who?\n\nAnswer:"
    assert document.startswith("A report.")
    assert document.endswith("told here.")
    document, question = data.split_question("x" * 3000)
    assert len(document) + len(question) == 3000


def test_the_middle_is_left_out() -> None:
    def encode(text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(tokens: object) -> str:
        return "".join(map(chr, tokens))  # type: ignore[call-overload]

    assert data.without_middle("abcdefgh", encode, decode, 5) == "ab\n[...]\nfgh"
    assert data.without_middle("abc", encode, decode, 5) == "abc"


def test_letters_are_right_at_the_beginning_alone() -> None:
    row = data.LongRow(name="x", kind="longbench-v2", document="d", question="q", answers=("B",))
    assert row.right("B") and row.right(" (B) because")  # noqa: PT018
    assert not row.right("A or B")


def test_the_real_rows_can_be_read(measuring_data: Path) -> None:
    found = data.long_bench(measuring_data, data.ANSWERED, words, 100, 5000)
    assert len(found) > 10
    prompts = {
        row.identifier: row.prompt
        for row in load_long_bench(find_file(measuring_data, "longbench_v1_mini.jsonl"))
    }
    for row in found:
        assert row.answers
        assert row.document[:40] in prompts[row.name]
    second = data.long_bench_v2(measuring_data, words, 20_000)
    assert second
    assert all(row.answers[0] in "ABCD" for row in second)


def test_every_label_may_be_published_and_made() -> None:
    for label, make in METHODS.items():
        check_method(label)
        made = make()
        if label.startswith(("rapid", NAIVE)):
            assert isinstance(made, RapidDecoder)
    etas = [METHODS[with_eta(eta)]() for eta in ETAS]
    assert [method.eta for method in etas if isinstance(method, RapidDecoder)] == list(ETAS)


def record(method: str, row: str, seconds: float, *, right: bool, nats: float, passes: int = 10) -> Record:
    figures = {"end_to_end_ms": 1e3 * (seconds + 1), "verify_ms": 100.0, "draft_ms": 50.0, "gold_nats": nats}
    outcome = Outcome(
        tokens=20,
        seconds=seconds,
        output="x",
        passes=passes,
        drafted=10,
        accepted=5,
        correct=right,
        figures=figures,
    )
    key = RecordKey(task="quality/x", row=row, method=method, repeat=0)
    return Record(suite="longcontext", version="1", setting="s", key=key, outcome=outcome)


def test_figures_tell_step_times_and_who_is_right_alone() -> None:
    rapid = with_eta(10)
    records = [
        *(record(LC, row, 2.0, right=row == "a", nats=-2.0, passes=20) for row in "abcd"),
        *(record(RAG, row, 1.0, right=row == "b", nats=-3.0, passes=20) for row in "abcd"),
        *(record(rapid, row, 1.0, right=row in "bc", nats=-1.5) for row in "abcd"),
    ]
    figures = Figures(records)
    found = {
        entry.method: figures.of(entry)
        for entry in summarise(records, baselines=[LC], overall=False)
        if entry.baseline == LC
    }
    mine = found[rapid]
    # Two tokens a round, each round 100 ms of verification and 50 of drafting, against 100 ms a token.
    assert mine["steps_speedup"] == pytest.approx(2 * 100 / 150)
    assert mine["end_to_end_speedup"] == pytest.approx(1.5)
    assert (mine["gained"], mine["lost"], mine["only_this"]) == (0.5, 0.25, 0.25)
    assert mine["gold_nats_over_lc"] == pytest.approx(0.5)
    assert mine["gold_nats_over_rag"] == pytest.approx(1.5)
    assert "steps_speedup" not in found[RAG]
    assert found[RAG]["gained"] == 0.25


def test_a_simulated_round_is_made_of_measured_passes() -> None:
    model = longcontext_simulated.random_model("cpu", 300)
    trials = longcontext_simulated._trials(model, 200, 2.5, (LC, "rapid"))
    plain, rapid = trials[LC](), trials["rapid"]()
    assert (plain.tokens, rapid.tokens, rapid.passes) == (1000, 2500, 1000)
    assert plain.seconds is not None
    assert plain.seconds > 0
    # A thousand rounds, in milliseconds each.
    assert rapid.seconds == pytest.approx(rapid.figures["draft_ms"] + rapid.figures["verify_ms"])


def test_self_speculation_holds_the_weights_once(smollm2: Path) -> None:
    """Two sessions of one model beside one that reads the part alone, with the same encoder of sentences, each in a
    process; a second copy of the weights would be 258 MiB."""
    document = load_text(None).content[:4000]
    row = data.LongRow(name="memory", kind="memory", document=document, question="What is this about?")
    subjects = Subjects(SMALL, "cpu")
    figures = {
        method: longcontext_memory.memory_trial(subjects, row, 128, method)().figures
        for method in (RAG, LOSSLESS)
    }
    for found in figures.values():
        assert 258 < found["loaded_mib"] < found["peak_mib"]
    assert figures[LOSSLESS]["peak_mib"] < figures[RAG]["peak_mib"] + 130


@PACKED_BF16
@pytest.mark.slow
def test_a_quick_run_measures_every_part_and_draws(smollm2: Path, tmp_path: Path) -> None:
    command = ["bench", "longcontext", "--quick", "--no-plots", "--out", str(tmp_path), "--json", "-"]
    result = CliRunner().invoke(app, command)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    found = from_json_lines(result.stdout)
    speed = {
        entry.method: entry for entry in found if entry.task.startswith("speed/1") and entry.baseline == LC
    }
    assert set(speed) == {"rapid", NAIVE, "rapid+eta=10", "streaming-drafter", RAG}
    assert not [entry for entry in found if "failures" in entry.extra]
    for entry in speed.values():
        assert entry.speedup is not None
        assert entry.extra["prefill_ms"]
    assert float(str(speed["rapid"].extra["steps_speedup"])) > 0
    judged = [entry for entry in found if entry.task.startswith("quality/needle") and entry.baseline == LC]
    assert {entry.method for entry in judged} == {"rapid", NAIVE, "rapid+eta=10", RAG}
    assert all(entry.accuracy is not None for entry in judged)
    assert all("gold_nats_over_rag" in entry.extra for entry in judged if entry.method == "rapid")
    drawn = list(pictures(found, tmp_path))
    assert [path.name for path in drawn] == ["longcontext-speed-smollm2-135m.png"]
