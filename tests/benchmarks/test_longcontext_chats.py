"""Chat histories of the longcontext suite, what its methods read of them, the judge, and the shortened target."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.longcontext.data import LongRow, conversations
from benchmarks.longcontext.judge import _ASKED, Judge
from benchmarks.longcontext.labels import LC, LOSSLESS, NAIVE, RAG
from benchmarks.longcontext.subjects import Subjects
from benchmarks.longcontext.upward import without_layers
from specrag.bench.data import find_file, read_json_lines
from specrag.engine.executor import run
from specrag.engine.outputs import LOGITS, Row
from specrag.engine.passes import Coroutine
from specrag.engine.session import Session
from specrag.errors import InputError
from specrag.models.loading import load_model
from specrag.models.weights import read_weights
from specrag.speculation.tree import EMPTY


def words(text: str) -> list[int]:
    return [len(word) for word in text.split()]


def test_a_dialogue_stands_in_its_order_among_others(measuring_data: Path) -> None:
    rows = conversations(measuring_data, words, 2000, 5)
    assert len({row.name for row in rows}) == 5
    assert rows == conversations(measuring_data, words, 2000, 5)
    originals = [
        [turn["user"] for turn in row["history"]]  # type: ignore[attr-defined]
        for row in read_json_lines(find_file(measuring_data, "mtbench101.jsonl"))
    ]
    for row in rows:
        own = [message["content"] for message in row.own_messages[::2]]
        assert [*own, row.question] in originals
        assert [message["role"] for message in row.messages] == ["user", "assistant"] * (
            len(row.messages) // 2
        )
        said = iter(row.messages)
        assert all(any(message == mine for message in said) for mine in row.own_messages)  # a subsequence
        assert len(row.messages) > 2 * len(row.own_messages)
        size = sum(len(words(message["content"])) + 4 for message in row.messages)
        assert 1200 < size <= 2000
        assert len(row.answers) == 1
        assert not row.can_be_right


def test_without_data_there_is_none_and_a_damaged_file_is_named(tmp_path: Path) -> None:
    assert conversations(None, words, 2000, 5) == []
    (tmp_path / "mtbench101.jsonl").write_text('{"id": 7, "history": [{"user": "Hello"}]}\n')
    with pytest.raises(InputError, match=r"mtbench101.jsonl: 'row 7' .* needs user and bot"):
        conversations(tmp_path, words, 2000, 5)


def _scored(session: Session, tokens: list[int]) -> Coroutine[Row]:
    yield from session.extend(tokens)
    rows = yield from session.score(EMPTY, LOGITS)
    return rows[0]


@pytest.fixture(scope="module")
def judge(smollm2: object) -> Judge:
    return Judge("smollm2-135m", "cpu")


def test_a_rating_is_the_mean_under_the_judges_distribution(judge: Judge) -> None:
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    rating = judge.rating(asked, "It is Paris.")
    llm = judge._loaded
    assert llm is not None
    text = f"User: What is the capital of France?\n\nAssistant: It is Paris.\n\n{_ASKED}"
    tokens = llm.tokenizer.chat([{"role": "user", "content": text}])
    row = run(_scored(Session(llm.model), tokens))
    assert row.logits is not None
    weights = np.exp([row.logits[llm.tokenizer.encode(digit, special=False)[0]] for digit in "12345"])
    assert rating == pytest.approx(float(weights @ [1, 2, 3, 4, 5] / weights.sum()), rel=1e-3)
    assert judge.rating(asked, "It is Paris.") == rating
    assert judge.rating(asked, "I do not know it.") != rating


def test_methods_read_a_conversation_as_it_was_or_the_exchanges_that_matter(
    judge: Judge, smollm2: object
) -> None:
    def exchange(question: str, answer: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    own = exchange("My dog is called Bruno. What is a good name for a cat?", "Call it Minka.")
    others = [
        exchange(f"What is {n} plus {n}?", f"It is {2 * n}. " + "Adding is simple. " * 12) for n in range(20)
    ]
    messages = tuple(message for each in (*others[:9], own, *others[9:]) for message in each)
    row = LongRow(
        name="x",
        kind="conversation",
        document="",
        question="What is my dog called?",
        answers=("Bruno.",),
        messages=messages,
        own_messages=tuple(own),
    )
    subjects = Subjects("smollm2-135m", "cpu", scoring="bm25", window=256, judge=judge)
    prepared = subjects.prepare(row, 256)
    assert subjects.tokenizer.decode(prepared.tokens).count("plus") == 20
    read = subjects.tokenizer.decode(prepared.reading(subjects.tokenizer))
    assert "Bruno" in read
    assert read.count("plus") < 10
    subjects.score_gold(prepared)
    made = {label: subjects.trial(label, prepared, 16, ends=True)() for label in (LC, LOSSLESS, NAIVE, RAG)}
    assert made[LC].output == made[NAIVE].output == made[LOSSLESS].output
    for outcome in made.values():
        assert outcome.correct is None
        assert 1 < outcome.figures["rating"] < 5
        assert np.isfinite(outcome.figures["gold_nats"])
    assert made[LC].figures["rating"] == made[NAIVE].figures["rating"]
    subjects.close()


def test_a_target_without_some_layers_is_a_model_of_its_own(smollm2: object, tmp_path: Path) -> None:
    folder = without_layers("smollm2-135m", (20, 21), tmp_path)
    stamp = (folder / "config.json").stat().st_mtime_ns
    assert without_layers("smollm2-135m", (20, 21), tmp_path) == folder
    assert (folder / "config.json").stat().st_mtime_ns == stamp
    small, whole = load_model(folder, device="cpu"), load_model("smollm2-135m", device="cpu")
    assert small.model.config.num_hidden_layers == 28  # type: ignore[attr-defined]
    assert small.tokenizer.vocab_size == whole.tokenizer.vocab_size
    for number, same in ((19, 19), (20, 22), (27, 29)):
        left, right = (
            read_weights(files)[f"model.layers.{layer}.mlp.up_proj.weight"]
            for files, layer in ((small.files, number), (whole.files, same))
        )
        assert torch.equal(left, right)
