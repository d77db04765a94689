"""Scores of given texts against transformers, alone and packed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from specrag.engine.executor import run
from specrag.engine.outputs import Row
from specrag.engine.passes import Segment
from specrag.errors import ContextLengthError, InputError
from specrag.models import scoring
from specrag.models.roles import (
    PartScore,
    ScoredText,
    ScoringRequest,
    TextPart,
    TextPrompt,
    TextScorer,
    assign,
)
from specrag.models.scoring import LocalScorer

if TYPE_CHECKING:
    from specrag import LanguageModel

QUESTION = "Question: Which city is the capital of France?"


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> Any:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    module = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    return module, AutoTokenizer.from_pretrained(smollm2)


def request(answer: str, rationale: str, prompt: TextPrompt = QUESTION) -> ScoringRequest:
    return ScoringRequest(
        prompt,
        (
            TextPart("cue", "\nAnswer:", scored=False),
            TextPart("answer", answer),
            TextPart("second cue", "\nRationale:", scored=False),
            TextPart("rationale", rationale),
            TextPart("statement", "\nDoes it support the answer? (Yes or No)", scored=False),
            TextPart("yes", " Yes"),
        ),
    )


DRAFTS = [
    request(" Paris", " The passage calls Paris the capital of France."),
    request(" Paris", " The passage calls Lyon a large city."),
    request(" Łódź 🏛", " Naïve façade: the 🏛 stands in Łódź.\nIt says so."),
    request("", " Nothing is said about it."),
    request(" Paris", " The passage calls Paris the capital of France."),
]


def score(llm: LanguageModel, requests: Sequence[ScoringRequest]) -> list[ScoredText]:
    return run(LocalScorer(llm.loaded).scoring(requests))


def slowly(reference: Any, request: ScoringRequest) -> dict[str, list[float]]:
    """One draft alone, by transformers' own model and tokenizer; a token starts where the text before it ends."""
    module, tokenizer = reference
    if isinstance(request.prompt, str):
        text = request.prompt
    else:
        text = tokenizer.apply_chat_template(request.prompt, add_generation_prompt=True, tokenize=False)
    borders = []
    for part in request.parts:
        borders.append((len(text.encode()), part.name))
        text += part.text
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    with torch.inference_mode():
        log_probs = torch.log_softmax(module(torch.tensor([ids])).logits[0].float(), dim=-1)
    found: dict[str, list[float]] = {part.name: [] for part in request.parts}
    start = 0
    for place, token in enumerate(ids):
        name = [name for border, name in borders if border <= start][-1:]
        if name and place:
            found[name[0]].append(float(log_probs[place - 1, token]))
        # Byte-level: a token's length in bytes is its length in the vocabulary's letters; special ones are plain text.
        start += len(tokenizer.convert_ids_to_tokens(token))
    return found


def count_rows(llm: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets the number of rows of every pass from now on."""
    rows: list[int] = []
    forward = llm.model.forward

    def counting(segments: Sequence[Segment]) -> list[list[Row]]:
        rows.append(sum(len(segment.tokens) for segment in segments))
        return forward(segments)

    monkeypatch.setattr(llm.model, "forward", counting)
    return rows


def check(found: ScoredText, wanted: Mapping[str, Sequence[float]]) -> None:
    assert set(found.parts) == {"answer", "rationale", "yes"}
    for name, part in found.parts.items():
        assert list(part.log_probs) == pytest.approx(list(wanted[name]), abs=1e-4), name


@pytest.mark.parametrize("number", range(len(DRAFTS) - 1))
def test_scores_equal_those_of_each_draft_alone_by_transformers(
    exact_llm: LanguageModel, reference: Any, number: int
) -> None:
    check(score(exact_llm, DRAFTS)[number], slowly(reference, DRAFTS[number]))


def test_a_conversation_goes_through_the_chat_template(exact_llm: LanguageModel, reference: Any) -> None:
    asked = request(" Paris", " It says so.", [{"role": "user", "content": QUESTION}])
    check(score(exact_llm, [asked])[0], slowly(reference, asked))
    bare = score(exact_llm, [request(" Paris", " It says so.")])[0]
    assert bare.parts["answer"].total != pytest.approx(slowly(reference, asked)["answer"][0], abs=1e-2)


def test_packed_scores_equal_those_alone_in_any_order(exact_llm: LanguageModel) -> None:
    packed = score(exact_llm, DRAFTS)
    backwards = score(exact_llm, DRAFTS[::-1])[::-1]
    for number, draft in enumerate(DRAFTS):
        alone = score(exact_llm, [draft])[0]
        for other in (packed[number], backwards[number]):
            check(other, {name: part.log_probs for name, part in alone.parts.items()})


def test_what_texts_have_in_common_is_read_once(
    exact_llm: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = count_rows(exact_llm, monkeypatch)
    scored = score(exact_llm, DRAFTS)
    assert rows == [sum(text.read_tokens for text in scored)]  # one pass
    assert scored[0].read_tokens == scored[0].prompt_tokens - 1
    assert scored[1].read_tokens < scored[1].prompt_tokens - 15
    assert scored[4].read_tokens == 0


def test_a_tree_larger_than_a_pass_is_read_in_several(
    exact_llm: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = score(exact_llm, DRAFTS)
    passes = count_rows(exact_llm, monkeypatch)
    monkeypatch.setattr(scoring, "ROWS", 17)
    for found, wanted in zip(score(exact_llm, DRAFTS), whole, strict=True):
        check(found, {name: part.log_probs for name, part in wanted.parts.items()})
    assert len(passes) > 5
    assert max(passes) == 17


@pytest.mark.parametrize("beginning", [600, 1_100])
def test_a_long_common_beginning_is_read_as_a_prompt(
    exact_llm: LanguageModel, monkeypatch: pytest.MonkeyPatch, beginning: int
) -> None:
    common = " on" * beginning
    ends = (
        "",
        "",
        " in a city of the north",
    )  # the third text parts from the others before anything is scored
    long = [
        request(f" {answer}", " It says so.", common + end) for answer, end in zip("ABC", ends, strict=True)
    ]
    alone = [score(exact_llm, [each])[0] for each in long]
    rows = count_rows(exact_llm, monkeypatch)
    for found, wanted in zip(score(exact_llm, long), alone, strict=True):
        check(found, {name: part.log_probs for name, part in wanted.parts.items()})
    assert max(rows) <= 512
    # Behind the prompt only what each text has of its own is read as a tree.
    assert rows[-1] < 100


def test_an_invariant_model_gives_equal_bits_packed_alone_and_in_several_passes(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import specrag

    llm = specrag.load("smollm2-135m", device="cpu", batch_invariant=True)
    packed = score(llm, DRAFTS[:2])
    assert [score(llm, [draft])[0].parts for draft in DRAFTS[:2]] == [text.parts for text in packed]
    long = [request(answer, " It says so.", " on" * 600) for answer in (" Paris", " Łódź")]
    packed = score(llm, long)
    assert [score(llm, [draft])[0].parts for draft in long] == [text.parts for text in packed]
    monkeypatch.setattr(scoring, "ROWS", 17)
    assert [text.parts for text in score(llm, long)] == [text.parts for text in packed]
    assert score(llm, [ScoringRequest("A", (TextPart("nothing", ""),))])[0].parts["nothing"].total == 0.0
    llm.close()


def test_a_text_longer_than_the_context_is_refused_before_any_work(
    exact_llm: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exact_llm.model, "forward", None)
    with pytest.raises(ContextLengthError, match="the model's context holds 8,192; shorten the passages"):
        LocalScorer(exact_llm.loaded).scoring([request(" Paris", " on" * 8200)])


def test_roles(exact_llm: LanguageModel) -> None:
    scorer = LocalScorer(exact_llm.loaded)
    assert isinstance(scorer, TextScorer)
    assert scorer.name == "smollm2-135m"
    scorer.check_scoring()
    assert scorer.count("Hello there") == 2
    assert scorer.count([{"role": "user", "content": "Hello there"}], "Yes") > 10


def test_a_token_belongs_to_the_part_in_which_it_starts() -> None:
    #       a   b   c   d     parts [2, 5), [5, 5), [5, 9), [9, ...)
    assert assign([0, 2, 4, 5, 8, 9, 12], [2, 5, 5, 9]) == [-1, 0, 0, 2, 2, 3, 3]


def test_a_part_without_tokens_is_an_empty_product() -> None:
    assert (PartScore(()).total, PartScore(()).mean, PartScore(()).count) == (0.0, 0.0, 0)
    assert PartScore((-1.0, -2.0)).mean == -1.5


def test_bad_requests() -> None:
    with pytest.raises(InputError, match="prompt: '' is not usable: give a text of at least one character"):
        ScoringRequest("", (TextPart("a", "b"),))
    with pytest.raises(InputError, match="give at least one part, each with a name of its own"):
        ScoringRequest("Q", (TextPart("a", "b"), TextPart("a", "c")))
    with pytest.raises(InputError, match="give messages of the form"):
        ScoringRequest([{"role": "user"}], (TextPart("a", "b"),))
