"""The proposer for vLLM, driven with simulated batches."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.vllm.proposal import microseconds
from specrag.errors import InputError
from specrag.integrations.vllm import Drafter, Settings, requests, rows
from specrag.integrations.vllm.copying import Acceptance, Chain, Found
from specrag.integrations.vllm.memory import AnswerMemory
from specrag.models.catalog import ModelFiles
from specrag.models.tokenizer import Tokenizer
from specrag.speculation.drafters import RequestText
from specrag.speculation.suffix import SuffixAutomaton, build_corpus
from tests.integrations.vllm_batches import Asked, Engine, config
from tests.processor import slowness


def text(length: int, first: int = 0, size: int = 1000) -> list[int]:
    """Tokens from ``first`` on, of which hardly any stand side by side twice."""
    return [first + random.randrange(size) for _ in range(length)]


def quoting(name: str, first: int = 0, quoted: int = 60, extra: Any = None, reading: int = 1) -> Asked:
    """A request whose answer is a piece of its prompt."""
    prompt = text(120, first)
    return Asked(name, [*prompt, first, first + 1], [*prompt[20 : 20 + quoted], first + 2], extra, reading)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for every row that was indexed from its beginning."""
    counted: list[int] = []

    class Counted(RequestText):
        def __init__(self, references: Sequence[Sequence[int]] = ()) -> None:
            super().__init__(references)
            counted.append(1)

    monkeypatch.setattr(rows, "RequestText", Counted)
    return counted


# -- what is guessed ----------------------------------------------------------------------------------------------


def test_an_answer_that_quotes_its_prompt_comes_in_few_steps() -> None:
    engine = Engine(config(max_length=512))
    asked = engine.add(quoting("a"))
    engine.run()
    assert asked.steps < len(asked.answer) / 2.5
    assert asked.accepted > 0.9 * asked.drafted - 8
    stats = engine.drafter.stats
    assert stats.drafted == asked.drafted
    assert stats.accepted == pytest.approx(asked.accepted, abs=8)  # those of the last step are not compared
    assert stats.sources == {"request": asked.drafted}


def _chain(tokens: Sequence[int], most: int = 8) -> Chain:
    automaton = SuffixAutomaton()
    automaton.extend(tokens)
    found = Found(automaton, automaton.tokens, automaton.longest_match(), "request", automaton.tokens)
    return found.chain(most, Acceptance.of_one(), Acceptance.of_all())


def test_the_places_vote() -> None:
    head, common, rare = [1, 2, 3], [10, 11], [20, 21]
    chain = _chain([*head, *common, 6, *head, *common, 7, *head, *common, 8, *head, *rare, 9, *head])
    # Three of four go on with the common tokens; of those three, the newest comes first where they part.
    assert chain.tokens[:3].tolist() == [*common, 8]
    assert [grade % 4 for grade in chain.grades[:5]] == [2, 0, 3, 1, 1]
    assert [grade // 4 for grade in chain.grades[:6]] == [2, 3, 3, 4, 4, 4]
    assert (np.diff(chain.chances) <= 0).all()
    assert _chain([1, 2, 3]).tokens.tolist() == []


def test_a_place_among_the_same_words_counts_for_more() -> None:
    far, near, gap = [30, 31, 32, 33], [40, 41, 42, 43], [99] * 20
    tokens = [*far, 7, 8, 9, *gap, *near, 7, 10, 11, *gap, *far, 7, 8, 12, *gap]
    assert _chain([*tokens, 43, 41, 50, 42, 7]).tokens[0] == 10, "two places against one among the same words"
    assert _chain([*tokens, 50, 51, 52, 53, 7]).tokens[0] == 8


def test_guesses_are_judged_by_what_came_of_others_like_them() -> None:
    own, shared = Acceptance.of_one(), Acceptance.of_all()
    chain = _chain([1, 2, 3, 4, 5, 6, 1, 2], most=3)
    assert chain.tokens.tolist() == [3, 4, 5]
    assert chain.came(np.array([3, 4, 9], dtype=np.int32), own, shared) == 2
    assert own.counts["request"][:, chain.grades[0]].tolist() == [1, 1]
    assert own.counts["request"][:, chain.grades[2]].tolist()[1] < own.counts["request"][0, chain.grades[2]]
    before = chain.chances[0]
    for _ in range(30):
        assert chain.came(np.array([8], dtype=np.int32), own, shared) == 0
    automaton = SuffixAutomaton()
    automaton.extend([1, 2, 3, 4, 5, 6, 1, 2])
    found = Found(automaton, automaton.tokens, automaton.longest_match(), "request", automaton.tokens)
    assert found.chain(3, own, shared).chances[0] < 0.2 * before
    assert found.chain(3, Acceptance.of_one(), shared).chances[0] < 0.5 * before
    assert shared.rate("request") < Acceptance.of_all().rate("request")
    assert own.rate("corpus") == 0


def test_a_repetition_goes_on() -> None:
    engine = Engine(config(max_length=512))
    asked = engine.add(Asked("a", [9, 8, 7], [1, 2, 3] * 30))
    engine.run()
    assert asked.steps < 25


def test_limits_of_length_are_kept() -> None:
    engine = Engine(config(most=3, max_length=127))
    asked = engine.add(Asked("a", text(40) * 2, [0] * 45))
    while engine.rows:
        for guesses in engine.step():
            assert len(guesses) <= 3
            assert len(asked.text) + len(guesses) < 127
    assert asked.drafted


def test_a_prompt_that_is_being_read_gets_no_guesses_and_is_indexed_in_pieces() -> None:
    engine = Engine(config(max_length=20_000))
    prompt = text(12_000)
    asked = engine.add(Asked("a", prompt, [*prompt[11_000:11_030], 1], reading=2))
    assert engine.step() == [[]]
    (row,) = engine.drafter._rows._present
    assert row.indexed == 4096
    engine.run()
    assert asked.accepted > 10


# -- rows ---------------------------------------------------------------------------------------------------------


def test_rows_that_move_are_known_by_their_text(begun: list[int]) -> None:
    engine = Engine(config(max_length=512))
    asked = [engine.add(quoting(str(i), 1000 * i, 30 + 5 * i)) for i in range(9)]
    for _ in range(4):
        engine.step()
    engine.rows.reverse()
    for _ in range(3):
        engine.step()
    engine.add(quoting("new", 20_000), place=2)
    engine.run()
    assert len(begun) == 10
    for one in asked:
        assert one.accepted > 8, one.name


def test_a_row_is_guessed_for_from_its_own_text() -> None:
    engine = Engine(config(max_length=512))
    for i in range(12):
        engine.add(quoting(str(i), 1000 * i, 20 + 9 * (i % 5)))
    count = 0
    while engine.rows:
        before = list(engine.rows)
        for asked, guesses in zip(before, engine.step(), strict=True):
            first = 1000 * int(asked.name)
            assert all(first <= guess < first + 1000 for guess in guesses)
            count += len(guesses)
        if len(engine.rows) > 3:
            engine.rows.append(engine.rows.pop(0))
    assert count > 100


def test_a_row_that_is_preempted_and_comes_back_is_not_indexed_again(begun: list[int]) -> None:
    engine = Engine(config(max_length=512))
    first, second = engine.add(quoting("a", 0)), engine.add(quoting("b", 1000))
    for _ in range(5):
        engine.step()
    engine.preempt(first)
    engine.add(quoting("c", 2000), place=0)
    for _ in range(5):
        engine.step()
    accepted = first.accepted
    engine.resume(first)
    engine.run()
    assert len(begun) == 3
    assert first.accepted > accepted
    assert second.accepted > 8


@pytest.mark.parametrize("named", [False, True])
def test_a_row_that_is_replaced_by_one_like_it(begun: list[int], named: bool) -> None:
    """Same length, same end; only the beginning differs."""
    engine = Engine(config(max_length=512), named=named)
    end = text(60, 5000)
    ours, theirs = text(200, 0), text(200, 1000)
    old = engine.add(Asked("old", ours + end, [*text(3, 7000), 0, 0, 0, 0, 0, 0]))
    engine.step()
    engine.rows.remove(old)
    new = engine.add(Asked("new", theirs + end + [old.answer[0]], [7500, *theirs[50:80]]))
    new.written, new.reading = 0, 1
    while engine.rows:
        for guesses in engine.step():
            assert not set(guesses) & set(range(1000))
    assert len(begun) == 2
    assert new.accepted > 8


def test_a_row_that_shrank_is_begun_anew(begun: list[int]) -> None:
    engine = Engine(config(max_length=512))
    asked = engine.add(quoting("a"))
    for _ in range(6):
        engine.step()
    asked.written -= 3
    asked.guesses = []
    engine.run()
    assert len(begun) == 2
    assert asked.accepted > 8


def test_rows_that_left_are_forgotten_when_there_are_too_many() -> None:
    engine = Engine(config(max_length=512))
    for i in range(80):
        engine.add(quoting(str(i), 100 * i, 2))
        engine.run()
    assert len(engine.drafter._rows) <= 66
    engine = Engine(config(max_length=512), named=True)
    for i in range(20):
        engine.add(quoting(str(i), 100 * i, 2))
        engine.run()
    engine.add(quoting("last", 0, 2))
    engine.run()
    assert len(engine.drafter._rows) <= 2
    assert len(engine.drafter._seen) <= 2


@settings(max_examples=25)
@given(st.lists(st.integers(0, 5), min_size=20, max_size=60), st.booleans())
def test_whatever_vllm_does_each_row_has_its_own_text(moves: list[int], named: bool) -> None:
    engine = Engine(config(max_length=512), named=named)
    made = 0
    for move in moves:
        if move == 0 or not engine.rows:
            engine.add(quoting(str(made), 1000 * (made % 20), 40, reading=1 + made % 3), place=0)
            made += 1
        elif move == 1:
            engine.preempt(engine.rows[0])
        elif move == 2 and engine.preempted:
            engine.resume(engine.preempted[0])
        elif move == 3:
            engine.rows.append(engine.rows.pop(0))
        elif move == 4 and len(engine.rows) > 1:
            engine.rows.pop()  # cancelled
        if not engine.rows:
            continue
        before = list(engine.rows)
        texts = engine.step()
        assert len(texts) == len(before)
        known = engine.drafter._rows._present
        if engine.drafter._pace.reason == "paused":
            continue
        for asked, row in zip(before, known, strict=True):
            tokens = row.text.automaton.tokens[row.text.offset :]
            assert tokens.tolist() == asked.text[: len(tokens)]
            assert row.length == len(asked.text)


def test_a_token_that_is_none_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(config(max_length=512))
    engine.add(Asked("bad", [1, 2, -5, 4], [1, 2, 3]))
    with caplog.at_level(logging.WARNING, "vllm.specrag"):
        engine.run()
    assert [record.getMessage() for record in caplog.records] == [
        "specrag: rows are begun anew: tokens: -5 is not usable: give token ids from 0 to 16777214"
    ]
    asked = engine.add(quoting("good"))
    engine.run()
    assert asked.accepted > 8


# -- other texts --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer of numbers: ``t5`` is token 5."""
    from tokenizers import Tokenizer as Backend
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    backend = Backend(WordLevel({f"t{number}": number for number in range(5000)}, unk_token="t0"))
    backend.pre_tokenizer = Whitespace()
    folder = tmp_path_factory.mktemp("model")
    backend.save(str(folder / "tokenizer.json"))
    return folder


def words(tokens: Sequence[int]) -> str:
    return " ".join(f"t{token}" for token in tokens)


def test_passages_of_a_request(model: Path) -> None:
    passage = text(50, 100)
    answer = [*passage[10:40], 1]
    steps = {}
    for given_to in ("a", "b"):
        engine = Engine(config(model=str(model)), named=True)
        extra = {requests.PASSAGES: [words(passage), 7]}
        asked = engine.add(Asked("a", text(30, 2000), answer, extra if given_to == "a" else None))
        engine.add(Asked("b", text(30, 2000), text(40, 3000), extra if given_to == "b" else None))
        engine.run()
        steps[given_to] = asked.steps
        assert asked.accepted == (0 if given_to == "b" else pytest.approx(25, abs=5))
    assert steps["a"] < 12 < steps["b"]


def test_passages_are_bounded(model: Path) -> None:
    tokenizer = Tokenizer(ModelFiles("model", model, "", ""))
    request = requests.Request(
        "a",
        {requests.PASSAGES: [words([7] * 5000)] * 3},
        lambda passage: tokenizer.encode(passage, special=False),
    )
    assert [len(tokens) for tokens in request.passages()] == [5000, 3192]
    assert requests.Request("a", {requests.PASSAGES: "t1 t2"}, request.encode).passages() == [[1, 2]]
    assert requests.Request("a", {requests.PASSAGES: 5}, request.encode).passages() == []
    assert requests.Request("a", {requests.PASSAGES: "t1 t2"}).passages() == []


def test_no_guess_is_a_token_that_the_model_does_not_have() -> None:
    """vLLM's worker would abort."""
    engine = Engine(config(vocabulary=500))
    asked = engine.add(quoting("large", first=600))
    engine.run()
    assert min(asked.prompt) >= 500
    assert asked.accepted == 0


def test_what_nobody_expected_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(config())
    monkeypatch.setattr(engine.drafter._pace, "choose", lambda *_: 1 // 0)
    asked = engine.add(quoting("unlucky"))
    with caplog.at_level(logging.WARNING, "vllm.specrag"):
        engine.run()
    assert asked.written == len(asked.answer)
    assert [record.exc_info is not None for record in caplog.records] == [True]


def test_a_corpus(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = text(200, 100)
    fingerprint = Tokenizer(ModelFiles("model", model, "", "")).fingerprint
    build_corpus([source, text(300, 1000)], tmp_path / "corpus", tokenizer=fingerprint)
    monkeypatch.setenv("SPECRAG_CORPUS", str(tmp_path / "corpus"))
    engine = Engine(config(model=str(model)))
    engine.drafter._rehearse()
    asked = engine.add(Asked("a", text(30, 2000), [*source[50:90], 1]))
    engine.run()
    assert asked.steps < 15
    assert set(engine.drafter.stats.sources) == {"corpus"}

    build_corpus([source], tmp_path / "other", tokenizer="another")
    with pytest.raises(InputError, match="another"):
        Drafter(config(model=str(model), corpus=str(tmp_path / "other")))
    with pytest.raises(InputError, match="build one there first"):
        Drafter(config(model=str(model), corpus=str(tmp_path / "nowhere")))


def _second_time(engine: Engine, first: Any, second: Any) -> Asked:
    """The accepted guesses of a request whose answer another was given before."""
    answer = random.sample(range(300, 1300), 60)  # no token twice, so that nothing can be copied from itself
    engine.add(Asked("one", text(30, 1000), answer, first))
    engine.run()
    engine.add(Asked("between", text(30, 3000), text(5, 4000)))
    engine.run()
    again = engine.add(Asked("two", text(30, 2000), answer, second))
    engine.run()
    return again


ACME, OTHER = {requests.TENANT: "acme"}, {requests.TENANT: "other"}


@pytest.mark.parametrize(
    ("memory", "first", "second", "tenant", "copies"),
    [
        (10_000, ACME, ACME, "", True),
        (10_000, ACME, OTHER, "", False),
        (10_000, ACME, None, "", False),
        (10_000, None, None, "", False),
        (10_000, None, None, "everyone", True),
        (10_000, ACME, None, "everyone", False),
        (0, ACME, ACME, "everyone", False),
    ],
)
def test_earlier_answers_stay_with_their_tenant(
    memory: int, first: Any, second: Any, tenant: str, copies: bool
) -> None:
    engine = Engine(config(answer_memory=memory, tenant=tenant), named=True)
    again = _second_time(engine, first, second)
    assert (again.accepted > 30) == copies
    assert ("answers" in engine.drafter.stats.sources) == copies
    if not copies:
        assert again.accepted == 0


def test_an_answer_of_a_row_that_was_preempted_is_kept_once() -> None:
    engine = Engine(config(answer_memory=10_000, tenant="all"), named=True)
    asked = engine.add(Asked("a", text(30, 1000), text(40, 300)))
    for _ in range(10):
        engine.step()
    engine.preempt(asked)
    other = engine.add(Asked("b", text(30, 2000), text(9, 500)))
    engine.run()
    engine.resume(asked)
    engine.run()
    engine.add(Asked("c", text(30, 3000), text(2, 700)))
    engine.run()
    kept = [
        token for _, part in engine.drafter._memory._parts for token in part.tokens.tolist() if token >= 0
    ]
    assert sorted(kept) == sorted([*asked.answer, *other.answer])


def test_the_memory_is_bounded_and_its_oldest_part_goes() -> None:
    memory = AnswerMemory(1000)
    first = np.array(text(100, 0), dtype=np.int32)
    memory.add("a", first)
    assert memory.find("a", first[:50]) is not None
    for number in range(30):
        memory.add(f"tenant {number % 3}", np.array(text(90, 1000), dtype=np.int32))
        assert len(memory) <= 1000
    assert memory.find("a", first[:50]) is None
    long = np.array(text(5000, 0), dtype=np.int32)
    memory.add("a", long)
    assert len(memory) <= 1000
    found = memory.find("a", long[:40])
    assert found is not None
    assert found.match.length == 32


# -- settings and vLLM's runner -----------------------------------------------------------------------------------


def test_settings() -> None:
    environment = {"SPECRAG_CORPUS": "here", "SPECRAG_ANSWER_MEMORY": "5", "SPECRAG_TENANT": "me"}
    assert Settings.read(config(), environment) == Settings("here", 5, "me")
    assert Settings.read(config(corpus="there"), environment) == Settings("there", 5, "me")
    kept = Settings.read(config(answer_memory=9), {"SPECRAG_ANSWER_FOLDER": "disk"})
    assert kept == Settings(answer_memory=9, answer_folder="disk")
    assert Settings.read(SimpleNamespace(), {}) == Settings()
    for wrong, message in (
        ({"memory": 5}, "give one of corpus, answer_memory, answer_folder, tenant"),
        ({"answer_memory": -1}, "give a number of tokens"),
        ({"answer_memory": "5"}, "give a number of tokens"),
        ({"corpus": 5}, "give a text"),
        ({"answer_folder": "disk"}, "set answer_memory to the tokens that are kept there"),
    ):
        with pytest.raises(InputError, match=message):
            Settings.read(config(**wrong), {})
    with pytest.raises(InputError, match="give an object"):
        Settings.read(SimpleNamespace(additional_config={"specrag": 5}), {})
    with pytest.raises(InputError, match="SPECRAG_ANSWER_MEMORY: 'many'"):
        Settings.read(config(), {"SPECRAG_ANSWER_MEMORY": "many"})


def test_the_runner_shows_its_requests(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class GPUModelRunner:
        def __init__(self, drafter: Any) -> None:
            self.drafter = drafter
            self.input_batch = SimpleNamespace(req_ids=["a"])
            self.requests = {"a": SimpleNamespace(sampling_params=SimpleNamespace(extra_args=ACME))}

        def propose_draft_token_ids(self, told: str) -> str:
            return f"{told} {getattr(self.drafter, '_names', None)}"

    module = ModuleType("vllm.v1.worker.gpu_model_runner")
    module.GPUModelRunner = GPUModelRunner  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.v1", "vllm.v1.worker"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    drafter = Drafter(config())
    for _ in range(2):
        drafter.load_model(None)
    assert GPUModelRunner(drafter).propose_draft_token_ids("x") == "x ['a']"
    assert drafter._seen["a"].tenant == "acme"
    assert GPUModelRunner(object()).propose_draft_token_ids("x") == "x None"
    assert drafter.stats.calls == 0

    del GPUModelRunner.propose_draft_token_ids
    with caplog.at_level(logging.WARNING, "vllm.specrag"):
        drafter.load_model(None)
    assert "has no propose_draft_token_ids" in caplog.text


def test_a_line_in_the_log_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(config(), lambda *_: 1.0)
    engine.add(Asked("a", list(range(30)), list(range(1000, 1035))))
    with caplog.at_level(logging.INFO, "vllm.specrag"):
        engine.run()
    assert len(caplog.records) == 3
    assert caplog.records[0].getMessage().startswith("specrag: 10 steps; 0 guesses, 0% accepted; ")
    assert "because nothing to copy" in caplog.text


# -- time ---------------------------------------------------------------------------------------------------------


def least(length: int, rows: int) -> float:
    """Microseconds a row of a proposal where limits were set: what runs beside it slows the yardstick as well."""
    return min(microseconds(length, rows) / slowness() for _ in range(4))


@pytest.mark.slow
def test_a_proposal_takes_microseconds_however_long_the_text() -> None:
    short = least(8_192, 8)
    long = least(100_000, 8)
    assert short < 50
    # What is looked up no longer fits the processor's caches; were all of it read, it would be twelve times as long.
    assert long < 2 * short + 10


@pytest.mark.slow
def test_a_lone_row_takes_hardly_more() -> None:
    """Most of its time is what every call takes, whatever the rows."""
    assert least(8_192, 1) < 75
