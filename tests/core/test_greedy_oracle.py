"""Real models against transformers' own: greedy text, logits and hidden states, in fp32."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specrag.engine.executor import run
from specrag.engine.outputs import LOGITS, HiddenState, Outputs
from specrag.engine.passes import gather
from specrag.engine.sampling_params import SamplingParams
from specrag.engine.session import Session
from specrag.engine.stopping import StopConditions
from specrag.models.decoder import LeanDecoder
from specrag.models.loading import LoadedModel, load_model
from specrag.models.tokenizer import TextStream
from specrag.models.transformers import TransformersModel
from specrag.speculation.decode import Settings
from specrag.speculation.drafters.base import NoDrafter
from specrag.speculation.tree import EMPTY
from tests.speculation.guessing import Budgets, Decoded, RandomDrafter, decoding

PROMPTS = [
    "The capital of France is",
    "Once upon a time there was a fox who",
    "def add(first, second):\n",
    "One, two, three, four,",
    "Water boils at a temperature of",
]
STATES: tuple[HiddenState, ...] = ("final", "last", "ffn_input")


@dataclass
class Pair:
    """Our model and transformers' own module of the same files."""

    loaded: LoadedModel
    module: Any

    def tokens(self, prompt: str) -> list[int]:
        return self.loaded.tokenizer.encode(prompt, special=True)

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        out: np.ndarray = self.module(torch.tensor([list(tokens)]), use_cache=False).logits[0].numpy()
        return out

    @torch.inference_mode()
    def greedy(self, tokens: Sequence[int], count: int) -> list[int]:
        out = self.module.generate(
            torch.tensor([list(tokens)]),
            attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
            do_sample=False,
            max_new_tokens=count,
            pad_token_id=0,
        )
        tail: list[int] = out[0, len(tokens) :].tolist()
        return tail


def load_pair(name: str, folder: Path) -> Pair:
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return Pair(load_model(name, dtype="fp32", device="cpu"), module.eval())


@pytest.fixture(scope="module")
def smollm2_pair(smollm2: Path) -> Pair:
    pair = load_pair("smollm2-135m", smollm2)
    assert isinstance(pair.loaded.model, LeanDecoder)
    return pair


@pytest.fixture(scope="module")
def gemma_pair(model_home: Path) -> Pair:
    folder = Path(os.environ["SPECRAG_HOME"]) / "models" / "gemma-3-270m"
    if not (folder / "config.json").is_file():
        pytest.skip("gemma-3-270m (540 MB) is not in the model home: specrag models pull gemma-3-270m")
    pair = load_pair("gemma-3-270m", folder)
    assert isinstance(pair.loaded.model, TransformersModel)
    return pair


@pytest.fixture(params=["smollm2", "gemma"])
def pair(request: pytest.FixtureRequest) -> Pair:
    found: Pair = request.getfixturevalue(f"{request.param}_pair")
    return found


def greedy(
    pair: Pair, prompts: list[list[int]], count: int, answers: list[list[int]] | None
) -> list[Decoded]:
    """Without ``answers`` plainly, else with random trees that are partly right; all requests at once."""
    settings = Settings(StopConditions(count), SamplingParams())
    model, tokenizer = pair.loaded.model, pair.loaded.tokenizer
    return run(
        gather(
            [
                decoding(
                    model,
                    prompt,
                    settings,
                    NoDrafter() if answers is None else RandomDrafter(n, model.vocab_size, answers[n]),
                    Budgets([0] if answers is None else [6, 2]),
                    TextStream(tokenizer),
                )
                for n, prompt in enumerate(prompts)
            ]
        )
    )


@pytest.mark.slow
def test_greedy_text_is_that_of_transformers(pair: Pair) -> None:
    """A gap of less than 1e-3 between the two best logits would be a tie; the prompts have none."""
    # transformers must neither shape the logits on its own nor end early.
    pair.module.generation_config.repetition_penalty = None
    pair.module.generation_config.eos_token_id = None
    lean = isinstance(pair.loaded.model, LeanDecoder)
    count, texts = (32, PROMPTS) if lean else (16, PROMPTS[:2])  # gemma is slow in fp32
    prompts = [pair.tokens(text) for text in texts]
    expected = [pair.greedy(prompt, count) for prompt in prompts]
    assert {len(answer) for answer in expected} == {count}
    plain = greedy(pair, prompts, count, None)
    assert [output.tokens for output in plain] == expected
    guessed = greedy(pair, prompts, count, expected)
    assert [output.tokens for output in guessed] == expected
    # Random trees take different ways to the same text, so how many of their tokens are right is only bounded.
    assert sum(step.accepted for output in guessed for step in output.steps) > count // 2
    for output, tokens in zip(plain, expected, strict=True):
        assert output.text == pair.loaded.tokenizer.decode(tokens)


def test_logits_are_those_of_transformers(pair: Pair) -> None:
    tokens = pair.tokens(" ".join(PROMPTS) * 3)
    expected = pair.logits(tokens)
    session = Session(pair.loaded.model)
    rows = run(session.extend(tokens, LOGITS, chunk=50))
    rows += run(session.score(EMPTY, LOGITS))
    assert len(rows) == len(tokens)
    for place, row in enumerate(rows):
        assert row.logits is not None
        np.testing.assert_allclose(row.logits, expected[place], atol=1e-3, rtol=0)


def test_hidden_states_are_those_of_transformers(pair: Pair) -> None:
    tokens = pair.tokens(PROMPTS[1])
    layers = pair.module.model.layers
    caught: dict[str, torch.Tensor] = {}
    hooks = [
        layers[-1].mlp.register_forward_pre_hook(lambda _, args: caught.update(ffn_input=args[0][0])),
        layers[-1].register_forward_hook(
            lambda _, __, out: caught.update(last=(out[0] if isinstance(out, tuple) else out)[0])
        ),
    ]
    try:
        with torch.inference_mode():
            out = pair.module(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    # transformers' last hidden state is the one after the last norm, which the output matrix reads.
    caught["final"] = out.hidden_states[-1][0]
    rows = run(Session(pair.loaded.model).extend([*tokens, tokens[0]], Outputs(hidden=STATES)))
    assert len(rows) == len(tokens)
    for name in STATES:
        ours = torch.stack([row.hidden[name] for row in rows])
        assert ours.shape == caught[name].shape
        scale = float(caught[name].abs().max())
        torch.testing.assert_close(ours, caught[name], atol=1e-4 * scale, rtol=0)
    assert not torch.allclose(caught["last"], caught["final"])


def test_only_the_hidden_states_asked_for_come(pair: Pair) -> None:
    session = Session(pair.loaded.model)
    rows = run(session.extend(pair.tokens(PROMPTS[0]), Outputs(hidden=("last",))))
    assert all(set(row.hidden) == {"last"} and row.logits is None for row in rows)
