"""Speculation inside transformers' own ``generate``; the oracle is ``generate`` without it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import StoppingCriteria, StopStringCriteria

from specrag.engine.executor import run
from specrag.engine.sampling_params import SamplingParams
from specrag.engine.stopping import StopConditions
from specrag.errors import ContextLengthError
from specrag.integrations.transformers import Speculate, speculate
from specrag.integrations.transformers_model import Borrowed
from specrag.methods.retrieval_decoder import RetrievalDecoder
from specrag.models import catalog
from specrag.models.toy import ToyModel
from specrag.speculation.decode import Settings
from specrag.speculation.drafters.retrieval import RetrievalSettings
from tests.integrations.small_modules import ROW, VOCAB, batch, build, check_equal
from tests.speculation.guessing import Budgets, OracleDrafter, decoding, plain_decoding


@pytest.fixture(scope="module")
def smollm2_module(smollm2: Path) -> Any:
    return tf.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Any:
    return tf.AutoTokenizer.from_pretrained(smollm2, padding_side="left")


class Heard(StoppingCriteria):  # type: ignore[misc]
    """Notes what it is called with, and ends a row behind a token."""

    def __init__(self, end: int = -1) -> None:
        self.end = end
        self.calls: list[list[int]] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.calls.append(input_ids[0].tolist())
        ended: torch.Tensor = input_ids[:, -1] == self.end
        return ended


class Collected:
    """A streamer that takes batches."""

    def __init__(self) -> None:
        self.puts: list[list[Any]] = []
        self.ends = 0

    def put(self, value: torch.Tensor) -> None:
        self.puts.append(value.tolist())

    def end(self) -> None:
        self.ends += 1


# -- greedy --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "mixtral"])
def test_greedy_output_is_that_of_generate(name: str, guessing: Speculate) -> None:
    module = build(name)
    check_equal(module, guessing, batch(ROW), max_new_tokens=48)
    assert guessing.usage is not None
    assert guessing.usage.accepted > 0
    assert guessing.usage.completion_tokens == 48
    check_equal(module, guessing, batch(ROW, [8, 8, 8], [4]), max_new_tokens=24)
    assert module.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.3},
        {"bad_words_ids": [[7], [5, 9]], "no_repeat_ngram_size": 3},
        {"eos_token_id": 33, "min_new_tokens": 5},
        {"eos_token_id": [33, 12], "min_length": 14, "exponential_decay_length_penalty": (4, 1.5)},
        {"suppress_tokens": list(range(3, 40)), "begin_suppress_tokens": [41, 42]},
        {"sequence_bias": [[[9], 4.0]], "eos_token_id": 9, "forced_eos_token_id": 9},
    ],
    ids=lambda options: "-".join(options),
)
def test_processors_work_in_batches(llama: Any, guessing: Speculate, options: dict[str, Any]) -> None:
    check_equal(llama, guessing, batch(ROW, [8, 8, 8, 33]), max_new_tokens=16, **options)


def test_a_processor_may_ask_which_row_it_is(llama: Any, guessing: Speculate) -> None:
    def allowed(row: int, tokens: torch.Tensor) -> list[int]:
        return list(range(10 + 10 * row, 20 + 10 * row))

    found = check_equal(
        llama, guessing, batch(ROW, [8, 8], ROW), max_new_tokens=12, prefix_allowed_tokens_fn=allowed
    )
    assert all(20 <= token < 30 for token in found[1, len(ROW) :].tolist())


def test_num_return_sequences_and_inputs_without_a_mask(llama: Any, guessing: Speculate) -> None:
    ids = torch.tensor([ROW])
    expected = llama.generate(ids, max_new_tokens=6)
    found = llama.generate(ids, max_new_tokens=6, custom_generate=guessing)
    assert found.tolist() == expected.tolist()
    sampled = llama.generate(
        ids, max_new_tokens=12, do_sample=True, num_return_sequences=3, custom_generate=guessing
    )
    assert len({tuple(row) for row in sampled.tolist()}) == 3


# -- stopping ------------------------------------------------------------------------------------------------


def test_the_end_token_cuts_an_accepted_run(llama: Any, guessing: Speculate) -> None:
    free = llama.generate(**batch(ROW), max_new_tokens=60)[0, len(ROW) :].tolist()
    cut_inside = 0
    for end in sorted(set(free)):
        found = check_equal(llama, guessing, batch(ROW), max_new_tokens=60, eos_token_id=end)
        assert found[0, -1] == end
        assert guessing.usage is not None
        # No bonus token behind the last guess: the text ended inside a run.
        rounds = guessing.usage.passes
        cut_inside += guessing.usage.accepted + rounds > guessing.usage.completion_tokens
    assert cut_inside > 0


def test_rows_end_where_they_would_alone(llama: Any, guessing: Speculate) -> None:
    inputs = batch(ROW, [8, 8, 8], [4, 4, 19])
    free = llama.generate(**inputs, max_new_tokens=20)[:, len(ROW) :].tolist()
    ends = [free[0][2], free[2][9]]
    found = check_equal(llama, guessing, inputs, max_new_tokens=20, eos_token_id=ends, pad_token_id=1)
    assert 1 in found[:, len(ROW) :]


def test_criteria_are_called_behind_every_token(llama: Any, guessing: Speculate) -> None:
    end = llama.generate(**batch(ROW), max_new_tokens=30)[0, -4].item()
    alone, speculated = Heard(end), Heard(end)
    expected = llama.generate(**batch(ROW), max_new_tokens=40, stopping_criteria=[alone])
    found = llama.generate(
        **batch(ROW), max_new_tokens=40, stopping_criteria=[speculated], custom_generate=guessing
    )
    assert found.tolist() == expected.tolist()
    assert speculated.calls == alone.calls
    assert speculated.calls[-1] == found[0].tolist()


def test_time_runs_out(llama: Any, guessing: Speculate) -> None:
    found = check_equal(llama, guessing, batch(ROW), max_new_tokens=40, max_time=1e-9)
    assert found.shape[1] == len(ROW) + 1


def test_the_context_ends(llama: Any, guessing: Speculate) -> None:
    prompt = (ROW * 13)[:120]
    found = llama.generate(**batch(prompt), max_new_tokens=100, custom_generate=guessing)
    # The token behind the last one that fits needs no place.
    assert found.shape[1] == 129
    with pytest.raises(ContextLengthError):
        llama.generate(**batch(ROW * 14), max_new_tokens=5, custom_generate=guessing)


@settings(max_examples=60, deadline=None)
@given(
    end=st.integers(0, 4),
    after=st.integers(0, 25),
    budget=st.integers(0, 6),
    temperature=st.sampled_from([0.0, 1.0]),
    max_tokens=st.integers(1, 25),
)
def test_until_ends_a_text_inside_a_run(
    end: int, after: int, budget: int, temperature: float, max_tokens: int
) -> None:
    model, prompt = ToyModel(), [1, 2, 3]
    sampling = SamplingParams(temperature=temperature, seed=7)
    free = plain_decoding(model, prompt, max_tokens=40, sampling=sampling).tokens
    heard: list[list[int]] = []

    def until(tokens: Sequence[int]) -> bool:
        heard.append(list(tokens))
        return len(tokens) > after and tokens[-1] == end

    asked = Settings(StopConditions(max_tokens), sampling, until=until)
    decoded = run(decoding(model, prompt, asked, OracleDrafter(0, 5, free), Budgets([budget])))
    hits = (place for place, token in enumerate(free) if place + 4 > after and token == end)
    length = min(next(hits, 99) + 1, max_tokens)
    assert decoded.tokens == free[:length]
    assert decoded.final_tokens == prompt + free[:length]
    assert heard == [prompt + free[: count + 1] for count in range(length)]
    assert decoded.reason == ("length" if length == max_tokens else "stop")


# -- sampling ------------------------------------------------------------------------------------------------

WARPED = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1}


def test_a_seed_gives_one_text_whatever_the_method(llama: Any, guessing: Speculate) -> None:
    texts = []
    for seed, speculation in ((1, guessing), (1, speculate("plain")), (2, guessing)):
        tf.set_seed(seed)
        found = llama.generate(
            **batch(ROW, [8, 8, 8]), **WARPED, max_new_tokens=24, custom_generate=speculation
        )
        texts.append(found.tolist())
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


def test_sampled_tokens_follow_the_law_of_generate(llama: Any) -> None:
    draws = 500
    options = {**WARPED, "max_new_tokens": 1, "return_dict_in_generate": True}
    scores = llama.generate(**batch(ROW), **options, output_scores=True).scores[0][0]
    probs = torch.softmax(scores.double(), dim=-1).numpy()
    tf.set_seed(5)
    found = llama.generate(
        **batch(ROW), **options, num_return_sequences=draws, custom_generate=speculate("plain")
    ).sequences[:, -1]
    counts = np.bincount(found.numpy(), minlength=VOCAB)
    assert not counts[probs == 0].any()
    kept = probs > 0
    assert kept.sum() > 3
    statistic = ((counts - draws * probs)[kept] ** 2 / (draws * probs[kept])).sum()
    # Four standard deviations of a chi-square; the seed is fixed.
    freedom = kept.sum() - 1
    assert statistic < freedom + 4 * np.sqrt(2 * freedom)


# -- streamers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [[ROW], [ROW, [8, 8, 8], [4, 4, 19]]], ids=["one", "batch"])
def test_streamers_are_given_what_generate_gives(
    llama: Any, guessing: Speculate, rows: list[list[int]]
) -> None:
    end = llama.generate(**batch(*rows), max_new_tokens=20)[0, len(ROW) + 3].item()
    alone, speculated = Collected(), Collected()
    options = {"max_new_tokens": 20, "eos_token_id": end, "pad_token_id": 1}
    llama.generate(**batch(*rows), **options, streamer=alone)
    llama.generate(**batch(*rows), **options, streamer=speculated, custom_generate=guessing)
    assert speculated.puts == alone.puts
    assert speculated.ends == 1


def test_text_streamers(
    smollm2_module: Any, tokenizer: Any, guessing: Speculate, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs = tokenizer("one two three one two three one", return_tensors="pt")
    options = {"max_new_tokens": 8, "custom_generate": guessing}
    printed = tf.TextStreamer(tokenizer, skip_prompt=True)
    sequences = smollm2_module.generate(**inputs, **options, streamer=printed)
    text = tokenizer.decode(sequences[0, inputs["input_ids"].shape[1] :])
    assert capsys.readouterr().out == text + "\n"

    pieces = tf.TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    thread = threading.Thread(
        target=smollm2_module.generate, kwargs={**inputs, **options, "streamer": pieces}
    )
    thread.start()
    assert "".join(pieces) == text
    thread.join()


# -- real models ---------------------------------------------------------------------------------------------

REPEATED = "one two three one two three one two three one"


def test_smollm2(smollm2_module: Any, tokenizer: Any, guessing: Speculate) -> None:
    inputs = tokenizer([REPEATED, "Name a metal."], return_tensors="pt", padding=True)
    check_equal(smollm2_module, guessing, inputs, max_new_tokens=8)
    assert guessing.usage is not None
    assert guessing.usage.accepted > 0


def test_stop_strings_as_a_criterion(smollm2_module: Any, tokenizer: Any, guessing: Speculate) -> None:
    inputs = tokenizer("one two three one two three one", return_tensors="pt")
    start = inputs["input_ids"].shape[1]
    free = smollm2_module.generate(**inputs, max_new_tokens=8)[0, start:]
    # It begins and ends inside a token.
    stop = tokenizer.decode(free[:4])[2:-1]
    criteria = [StopStringCriteria(tokenizer, stop_strings=[stop])]
    found = check_equal(smollm2_module, guessing, inputs, max_new_tokens=8, stopping_criteria=criteria)
    assert found[0, start:].tolist() == free[:4].tolist()


def test_gemma3(model_home: Path, guessing: Speculate) -> None:
    if not (model_home / "models" / "gemma-3-270m").is_dir():
        pytest.skip("gemma-3-270m is not in the models' home")
    folder = catalog.resolve("gemma-3-270m").folder
    module = tf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    phrase = [818, 8867, 659, 2604]  # its tokenizer takes seconds to load
    check_equal(module, guessing, {"input_ids": torch.tensor([[2, *phrase * 3, 818]])}, max_new_tokens=6)
    assert guessing.usage is not None
    assert guessing.usage.accepted > 0


def test_the_text_generation_pipeline(smollm2_module: Any, tokenizer: Any, guessing: Speculate) -> None:
    generator = tf.pipeline("text-generation", model=smollm2_module, tokenizer=tokenizer)
    options = {"max_new_tokens": 6, "do_sample": False}
    assert generator(REPEATED, custom_generate=guessing, **options) == generator(REPEATED, **options)
    assert guessing.usage is not None
    assert guessing.usage.completion_tokens == 6


# -- the object ----------------------------------------------------------------------------------------------


def test_an_object_learns_over_its_calls_and_verifies_a_model_once(llama: Any) -> None:
    method = RetrievalDecoder()
    speculation = speculate(method)
    passes: list[int] = []
    hook = llama.base_model.register_forward_pre_hook(
        lambda _module, _args, kwargs: passes.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    counts, learned = [], []
    try:
        for _ in range(2):
            passes.clear()
            llama.generate(**batch(ROW), max_new_tokens=2, custom_generate=speculation)
            counts.append(len(passes))
            with Borrowed(llama) as borrowed:
                learned.append(method._costs.of(borrowed.model))
    finally:
        hook.remove()
    # The prompt with the first token, and the second; before them two packed passes and the module's own.
    assert counts == [5, 2]
    assert speculation.method is method
    assert learned[0] is learned[1]
    assert learned[1].passes.measured


def test_relaxed_verification_passes_through(llama: Any) -> None:
    loose = RetrievalDecoder(
        drafter="none",
        relaxed=True,
        tolerance=50.0,
        relax_top_k=VOCAB,
        relax_matches=1,
        retrieval=RetrievalSettings(trigger=None),
        cost_aware=False,
    )
    speculation = speculate(loose)
    relaxed = []
    for first in range(2, 8):
        row = [first, 9, 33, 7, 50, 21, 40, 8] * 3
        llama.generate(**batch(row), max_new_tokens=16, custom_generate=speculation)
        assert speculation.usage is not None
        relaxed.append(speculation.usage.relaxed)
    assert sum(relaxed) > 0


def test_return_dict(llama: Any, guessing: Speculate) -> None:
    options = {"max_new_tokens": 4, "return_dict_in_generate": True}
    found = llama.generate(**batch(ROW), **options, custom_generate=guessing)
    assert type(found).__name__ == "GenerateDecoderOnlyOutput"
    assert found.sequences.tolist() == llama.generate(**batch(ROW), **options).sequences.tolist()


def test_training_mode_is_given_back(guessing: Speculate) -> None:
    module = build("llama").train()
    module.model.layers[0].eval()
    before = [part.training for part in module.modules()]
    module.generate(**batch(ROW), max_new_tokens=2, custom_generate=guessing)
    assert [part.training for part in module.modules()] == before
