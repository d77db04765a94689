"""Many texts in one batch: what prompts begin with is read once, and the rationale format is kept to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from specrag.engine.executor import run
from specrag.errors import ContextLengthError, InputError
from specrag.methods.generator import LocalGenerator, RationaleFormat, rationale_format
from specrag.models.roles import AnswerFormat, GeneratedText, Reluctance, TextGenerator, TextRequest

if TYPE_CHECKING:
    from specrag import LanguageModel

HEAD = "The notes say that copper is red and soft, that tin is white and melts early. " * 4
TAILS = (
    "Iron is grey. It rusts where it is wet, and it is the cheapest of all metals that there are. " * 4,
    "Gold is yellow. ",
)


def test_common_beginnings_are_read_once_at_every_depth(exact_llm: LanguageModel) -> None:
    prompts = [
        HEAD + TAILS[0] + "Iron and",
        HEAD + TAILS[1] + "Gold and",
        "Another text. Silver and",
        HEAD + TAILS[0] + "Rust and",
        HEAD + TAILS[0] + "Iron and",
    ]
    requests = [TextRequest(prompt, max_tokens=3) for prompt in prompts]
    shared = run(LocalGenerator(exact_llm).generating(requests))
    alone = run(LocalGenerator(exact_llm, share=False).generating(requests))
    assert [text.text for text in shared] == [text.text for text in alone]
    assert [text.prompt_tokens for text in shared] == [text.read_tokens for text in alone]
    head, tail = (len(exact_llm.tokenizer.encode(text, special=False)) for text in (HEAD, TAILS[0]))
    counts = [text.prompt_tokens for text in shared]
    wanted = [counts[0], counts[1] - head, counts[2], counts[3] - head - tail, counts[4] - head - tail]
    for text, count in zip(shared, wanted, strict=True):
        assert abs(text.read_tokens - count) <= 3


def test_what_is_told(exact_llm: LanguageModel) -> None:
    writer = LocalGenerator(exact_llm)
    assert isinstance(writer, TextGenerator)
    assert (writer.name, writer.context_length) == ("smollm2-135m", 8192)
    request = TextRequest([{"role": "user", "content": "Say hello."}], lead="Hel", max_tokens=4)
    (text,) = run(writer.generating([request]))
    assert text.prompt_tokens == writer.count(request.prompt, "Hel")
    assert "".join(token.text for token in text.tokens).startswith(text.text)
    assert all(token.log_prob is not None and token.log_prob <= 0 for token in text.tokens)
    assert (text.finish_reason, text.passes) in (("length", 4), ("stop", len(text.tokens)))


def test_prompts_are_checked_before_any_work(
    exact_llm: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exact_llm.model, "forward", None)
    with pytest.raises(ContextLengthError):
        LocalGenerator(exact_llm).generating([TextRequest("Hello"), TextRequest(" on" * 8192)])
    with pytest.raises(InputError, match="did you mean respec"):
        LocalGenerator(exact_llm, method="respek").generating([TextRequest("Hello")])
    with pytest.raises(InputError, match="temperature: -1"):
        TextRequest("Hello", temperature=-1)
    assert run(LocalGenerator(exact_llm).generating([])) == []


@pytest.mark.parametrize("method", ["plain", "respec"])
def test_a_cue_keeps_a_text_to_two_lines(exact_llm: LanguageModel, method: str) -> None:
    request = TextRequest(
        [{"role": "user", "content": "Name three rivers of Europe."}],
        max_tokens=40,
        answer_format=AnswerFormat("\nAnswer:", within=12),
    )
    (text,) = run(LocalGenerator(exact_llm, method=method).generating([request]))
    first, _, second = text.text.partition("\nAnswer:")
    assert 0 < len(exact_llm.tokenizer.encode(first, special=False)) <= 12
    assert "\n" not in first + second
    assert text.finish_reason == "length" or second.strip()


# -- the processor: tokens 0 "a", 1 "b", 2 line end, 3 ".\n", 4 end of text, 5 and 6 the rest of the cue ---------


LOGITS = np.log(np.array([0.3, 0.1, 0.2, 0.1, 0.1, 0.1, 0.1], dtype=np.float32))
FORM = RationaleFormat([2, 5, 6], 3, np.array([2, 3]), [4])


def after(*tokens: int) -> np.ndarray:
    """Probabilities after these tokens, not normalised."""
    place = FORM.start([])
    for token in tokens:
        place = FORM.advance(place, token)
    return np.exp(FORM.apply(LOGITS, place))


def test_what_would_end_the_first_line_is_the_cue() -> None:
    assert after(0) == pytest.approx([0.3, 0.1, 0.4, 0, 0, 0.1, 0.1])


def test_the_cue_is_written_to_its_end() -> None:
    assert after(0, 2).nonzero()[0].tolist() == [5]
    assert after(0, 2, 5).nonzero()[0].tolist() == [6]


def test_the_first_line_is_not_too_long() -> None:
    assert after(0, 1).nonzero()[0].tolist() == [0, 1, 2, 5, 6]
    assert after(0, 1, 0).nonzero()[0].tolist() == [2]


def test_what_would_end_the_second_line_is_the_end() -> None:
    assert after(0, 2, 5, 6, 1) == pytest.approx([0.3, 0.1, 0, 0, 0.4, 0.1, 0.1])


def test_no_line_is_empty() -> None:
    for before in ((), (0, 2, 5, 6)):
        assert after(*before) == pytest.approx([0.3, 0.1, 0, 0, 0, 0.1, 0.1])


def test_the_second_line_is_one_of_the_choices() -> None:
    form = RationaleFormat([2], 3, np.array([2, 3]), [4], choices=[(0,), (0, 1), (5, 6)])
    place = form.advance(form.advance(form.start([]), 0), 2)
    allowed = []
    for token in (0, 1):
        allowed.append(np.exp(form.apply(LOGITS, place)))
        place = form.advance(place, token)
    allowed.append(np.exp(form.apply(LOGITS, place)))
    assert allowed[0] == pytest.approx([0.3, 0, 0, 0, 0, 0.1, 0])
    assert allowed[1] == pytest.approx([0, 0.1, 0, 0, 0.4, 0, 0])
    assert allowed[2] == pytest.approx([0, 0, 0, 0, 0.4, 0, 0])


def test_a_tokenizers_own_tokens(exact_llm: LanguageModel) -> None:
    form = rationale_format(exact_llm.tokenizer, AnswerFormat("\nAnswer:"))
    tokens, place = [], form.advance(form.start([]), exact_llm.tokenizer.encode(" word", special=False)[0])
    logits = np.zeros(exact_llm.model.vocab_size, dtype=np.float32)
    for _ in range(len(exact_llm.tokenizer.encode("\nAnswer:", special=False))):
        tokens.append(int(form.apply(logits, place).argmax()))
        place = form.advance(place, tokens[-1])
    assert exact_llm.tokenizer.decode(tokens) == "\nAnswer:"
    ends = exact_llm.tokenizer.line_ends
    assert {exact_llm.tokenizer.encode(text, special=False)[0] for text in ("\n", "\n\n")} <= set(
        ends.tolist()
    )
    assert all("\n" in exact_llm.tokenizer.decode([token]) for token in ends.tolist())


@pytest.mark.parametrize(
    ("cue", "within", "choices"), [("Answer:", 5, ()), ("\nAnswer:", 0, ()), ("\nAnswer:", 5, (" ",))]
)
def test_bad_formats(cue: str, within: int, choices: tuple[str, ...]) -> None:
    with pytest.raises(InputError):
        AnswerFormat(cue, within, choices)


def test_a_text_begins_so_only_where_the_model_is_surer(exact_llm: LanguageModel) -> None:
    writer = LocalGenerator(exact_llm)
    prompt = "The capital of France is"

    def written(nats: float | None, begins: str = "") -> GeneratedText:
        shy = None if nats is None else Reluctance(begins, nats)
        (text,) = exact_llm.executor.run(
            exact_llm.executor.submit(
                writer.generating([TextRequest(prompt, lead=" the", max_tokens=6, reluctance=shy)])
            )
        )
        return text

    plain = written(None)
    first, second = plain.tokens[0].text, plain.tokens[1].text
    assert written(100, first).tokens[0].text != first
    assert written(1e-3, first).text == plain.text
    assert written(100, second).text == plain.text  # it may stand behind
