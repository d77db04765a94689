"""From texts to prompts to the target's own answers to its features, each stage going on where it was stopped."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from specrag.engine.outputs import Outputs
from specrag.engine.passes import Segment
from specrag.errors import InputError, SpecragError
from specrag.language_model import LanguageModel
from specrag.training.eagle import answers as eagle_answers
from specrag.training.eagle import features as eagle_features
from specrag.training.eagle.answers import Answer, AnswerStore, make_answers
from specrag.training.eagle.features import FeatureCache, Text, make_batch, texts_of
from specrag.training.eagle.prompts import Conversation, Passage, plan, read_sources
from specrag.training.eagle.run import DataSettings
from tests.training.tiny_run import DATA

PASSAGES = [
    Passage(f"Copper {number} is a soft red metal that carries heat well.", f"Copper {number}")
    for number in range(60)
]
WORDS = [f"word{number}" for number in range(14)]


def always(_done: int) -> bool:
    return True


def below(end: int) -> Callable[[int], bool]:
    return lambda done: done < end


# -- texts and prompts ----------------------------------------------------------------------------------------


def test_every_kind_of_file_gives_passages(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Herons nest in trees. " * 40, encoding="utf-8")
    rows = [{"title": "Tin", "text": "Tin is a metal."}, {"title": "b", "text": "Zinc rusts slowly."}]
    with gzip.open(tmp_path / "b.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write("\n".join(map(json.dumps, rows)))
    (tmp_path / "asked.jsonl").write_text('{"text": "What is tin?"}\n', encoding="utf-8")
    found = read_sources(
        [tmp_path / "a.txt", tmp_path / "b.jsonl.gz"],
        [tmp_path / "asked.jsonl"],
        tiny_model / "tokenizer.json",
    )
    assert len(found.passages) > 4  # the long text is cut
    assert Passage("Tin is a metal.", "Tin") in found.passages
    assert Passage("Zinc rusts slowly.", "") in found.passages  # its text does not say what "b" is
    assert found.prompts == ("What is tin?",)
    assert set(found.checksums) == {"a.txt", "b.jsonl.gz", "asked.jsonl"}
    assert found.excluded == 0


@pytest.mark.parametrize("shared", [12, 13])
def test_what_shares_a_run_of_words_with_a_benchmark_is_left_out(
    tiny_model: Path, tmp_path: Path, shared: int
) -> None:
    rows = [{"text": " ".join([*WORDS[:shared], "and", "more"])}, {"text": "something else"}]
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    benchmark = tmp_path / "benchmark.jsonl"
    turns = {"turns": ["First.", f"Say: {', '.join(word.upper() for word in WORDS)}!"], "number": 7}
    benchmark.write_text(json.dumps(turns) + "\n", encoding="utf-8")
    found = read_sources([data], [], tiny_model / "tokenizer.json", [benchmark])
    assert found.excluded == (shared == 13)
    assert len(found.passages) == 2 - found.excluded


def test_data_without_text_is_an_error(tiny_model: Path, tmp_path: Path) -> None:
    tokenizer = tiny_model / "tokenizer.json"
    (tmp_path / "empty.txt").write_text(" \n", encoding="utf-8")
    (tmp_path / "rows.jsonl").write_text('{"question": "What?"}\n', encoding="utf-8")
    (tmp_path / "long.txt").write_text(" ".join(WORDS), encoding="utf-8")
    for name, reason in (("empty.txt", "no text"), ("rows.jsonl", "no field text"), ("no.txt", "no such")):
        with pytest.raises(InputError, match=reason) as caught:
            read_sources([tmp_path / name], [], tokenizer)
        assert caught.value.field == "--data"
    with pytest.raises(InputError, match="exclude"):
        read_sources([tmp_path / "long.txt"], [], tokenizer, [tmp_path / "long.txt"])


def test_the_plan_depends_on_the_seed_alone() -> None:
    first = plan(PASSAGES, ["What is tin?"], chat=True, sampled=True, seed=1)
    assert first == plan(PASSAGES, ["What is tin?"], chat=True, sampled=True, seed=1)
    assert first != plan(PASSAGES, ["What is tin?"], chat=True, sampled=True, seed=2)
    assert [each.id for each in first] == [str(number) for number in range(61)]
    assert [each.greedy for each in first[:4]] == [True, False, True, False]
    assert all(each.greedy for each in plan(PASSAGES, chat=True, sampled=False, seed=1))
    assert sum(each.opening == "What is tin?" for each in first) == 1
    assert any(each.follow_up for each in first)
    # Not one task, and no text left to be filled in.
    assert len({each.opening.split()[0] for each in first}) > 10
    assert not any("{" in each.opening for each in first)


def test_a_text_that_names_nothing_gets_no_prompt_about_its_name() -> None:
    unnamed = [Passage(f"{number} is a number.", "") for number in range(200)]
    for each in plan(unnamed, chat=True, sampled=False, seed=0):
        assert "about ." not in each.opening
        assert "  " not in each.opening


def test_a_model_without_a_chat_template_continues_texts() -> None:
    found = plan([Passage("a b c d e f", "a")], chat=False, sampled=False, seed=0)
    assert found == [Conversation("0", "a b c", "", True)]


# -- answers --------------------------------------------------------------------------------------------------

ASKED = [Conversation(str(n), f"Say {n}.", "Again." if n % 3 == 0 else "", n % 2 == 0) for n in range(10)]


def test_answers_are_the_models_own(tiny_llm: LanguageModel, tmp_path: Path) -> None:
    store = AnswerStore(tmp_path / "answers.jsonl")
    settings = DataSettings(tokens=10**6, answer_tokens=8, length=200)
    assert make_answers(tiny_llm, ASKED, store, settings, always)
    assert sorted(store.answers) == sorted(
        [f"{n}/1" for n in range(10)] + [f"{n}/2" for n in range(10) if n % 3 == 0]
    )
    for answer in store.answers.values():
        # Sampled ones are keyed by the settings' seed and the batch's first conversation.
        temperature = 0.0 if answer.greedy else settings.temperature
        alone = tiny_llm.generate(
            list(answer.prompt), max_tokens=8, temperature=temperature, seed=0, method="plain"
        )
        assert answer.answer == tuple(token.token for token in alone.tokens)
    first, second = store.answers["6/1"], store.answers["6/2"]
    messages = [
        {"role": "user", "content": "Say 6."},
        {"role": "assistant", "content": tiny_llm.tokenizer.decode(first.answer)},
        {"role": "user", "content": "Again."},
    ]
    assert second.prompt == tuple(tiny_llm.tokenizer.chat(messages))


def test_stopped_answering_goes_on(
    tiny_llm: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eagle_answers, "BATCH", 2)
    settings = DataSettings(tokens=90, answer_tokens=8, length=200)
    whole = AnswerStore(tmp_path / "whole.jsonl")
    assert make_answers(tiny_llm, ASKED, whole, settings, always)
    assert 90 <= whole.tokens < 130
    # Stopped before each batch in turn, and killed in the middle of writing a line.
    path = tmp_path / "parts.jsonl"
    stops = 0
    while True:
        part = AnswerStore(path)
        torn = len(part.answers)
        if make_answers(tiny_llm, ASKED, part, settings, below(part.tokens + 1)):
            break
        stops += 1
        with path.open("ab") as file:
            file.write(b'{"id": "9/1", "prompt": [1, 2')
        assert len(AnswerStore(path).answers) > torn
    assert stops > 2
    assert AnswerStore(path).answers == whole.answers == part.answers
    assert path.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_a_damaged_line_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    AnswerStore(path).add([Answer("0/1", (1,), (2,), True)])
    path.write_bytes(b"{}\n" + path.read_bytes())
    with pytest.raises(SpecragError, match="line 1"):
        AnswerStore(path)


def test_prompts_that_leave_no_room_are_passed_over(tiny_llm: LanguageModel, tmp_path: Path) -> None:
    asked = [Conversation("0", "long " * 60, "Again.", True), Conversation("1", "Short.", "", True)]
    store = AnswerStore(tmp_path / "answers.jsonl")
    assert make_answers(tiny_llm, asked, store, DATA, always)
    assert list(store.answers) == ["1/1"]


# -- features -------------------------------------------------------------------------------------------------


def answers_of(llm: LanguageModel, count: int) -> list[Answer]:
    draw = random.Random(3)
    return [
        Answer(f"{n}/1", tuple(draw.choices(range(90), k=1 + n)), tuple(draw.choices(range(90), k=5)), True)
        for n in range(count)
    ]


def test_features_are_what_the_output_matrix_reads(
    tiny_llm: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eagle_features, "SHARD", 4)
    monkeypatch.setattr(eagle_features, "_PASS_ROWS", 20)
    texts = texts_of(answers_of(tiny_llm, 11), 14)
    assert [len(text.tokens) for text in texts] == [*range(6, 15), 14, 14]
    cache = FeatureCache(tmp_path / "features", texts, 64)
    # Stopped before each shard in turn.
    for shards in range(1, 4):
        assert not cache.is_full
        cache.fill(tiny_llm.model, below(4 * shards))
        assert len(list(cache.folder.iterdir())) == shards
    assert cache.is_full
    for number, text in enumerate(texts):
        outputs = [Outputs(hidden=("final",))] * len(text.tokens)
        (rows,) = tiny_llm.model.forward([Segment(tiny_llm.model.new_cache(), text.tokens, None, outputs)])
        expected = torch.stack([row.hidden["final"] for row in rows])
        assert cache.features(number).dtype == torch.bfloat16
        torch.testing.assert_close(cache.features(number).float(), expected, atol=0.02, rtol=0.01)


def test_a_row_has_a_feature_the_token_behind_it_and_what_follows(
    tiny_llm: LanguageModel, tmp_path: Path
) -> None:
    texts = [Text("0", (3, 4, 5, 6, 7, 8), 3, True), Text("1", (9, 10, 11, 12), 1, True)]
    cache = FeatureCache(tmp_path / "features", texts, 64)
    cache.fill(tiny_llm.model, always)
    batch = make_batch(cache, [1, 0], torch.device("cpu"))
    assert batch.lengths == (3, 5)
    assert batch.tokens.tolist() == [10, 11, 12, 4, 5, 6, 7, 8]
    assert batch.following.tolist() == [11, 12, -1, 5, 6, 7, 8, -1]
    # A draft first begins behind the answer's first token, whose row has the last feature of the prompt.
    assert batch.behind.tolist() == [0, 1, 2, -2, -1, 0, 1, 2]
    assert torch.equal(batch.features, torch.cat([cache.features(1)[:-1], cache.features(0)[:-1]]))
    assert torch.equal(batch.targets, torch.cat([cache.features(1)[1:], cache.features(0)[1:]]))


def test_more_texts_may_follow(
    tiny_llm: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eagle_features, "SHARD", 4)
    answers = answers_of(tiny_llm, 11)
    for count in (6, 11):
        cache = FeatureCache(tmp_path / "features", texts_of(answers[:count], 40), 64)
        assert not cache.is_full
        cache.fill(tiny_llm.model, always)
        assert cache.is_full
    for number, text in enumerate(cache.texts):
        assert cache.features(number).shape == (len(text.tokens), 64)


def test_a_damaged_shard_is_an_error(tiny_llm: LanguageModel, tmp_path: Path) -> None:
    cache = FeatureCache(tmp_path / "features", texts_of(answers_of(tiny_llm, 3), 40), 64)
    cache.fill(tiny_llm.model, always)
    (shard,) = cache.folder.iterdir()
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(SpecragError, match="delete the file"):
        cache.features(0)


def test_answers_too_short_to_learn_from_are_left_out() -> None:
    answers = [Answer("0/1", (1, 2), (3, 4), True), Answer("1/1", (1, 2), (3, 4, 5), False)]
    (text,) = texts_of(answers, 40)
    assert (text.conversation, text.tokens, text.begin, text.greedy) == ("1", (1, 2, 3, 4, 5), 2, False)
    assert texts_of(answers, 4) == []
