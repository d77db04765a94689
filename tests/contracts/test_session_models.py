"""One suite for everything that keeps sessions; its oracle is transformers' own ``model(...)``."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specrag.engine.executor import Executor
from specrag.engine.outputs import LOGITS, Outputs
from specrag.engine.passes import Coroutine, SessionModel, gather
from specrag.engine.session import Session
from specrag.errors import ContextLengthError, InputError
from specrag.models.decoder import LeanDecoder
from specrag.models.toy import ToyModel
from specrag.models.transformers import TransformersModel

Oracle = Callable[[list[int]], np.ndarray]


@dataclass(frozen=True)
class Case:
    """A model and the logits ``[vocab_size]`` that an independent implementation gives after some tokens."""

    model: SessionModel
    oracle: Oracle
    tolerance: float


@dataclass(frozen=True)
class Tree:
    tokens: list[int]
    parents: list[int]


VOCAB = 61


def tiny_configs() -> dict[str, Any]:
    import transformers as tf

    small: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    }
    return {
        "llama": tf.LlamaConfig(**small),
        "llama-rope-scaled": tf.LlamaConfig(
            **small,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 10_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        ),
        "qwen2": tf.Qwen2Config(**small),
        "qwen3": tf.Qwen3Config(**small, head_dim=16),
        "mistral-windowed": tf.MistralConfig(**small, sliding_window=24),
        "gemma3": tf.Gemma3TextConfig(
            **small, head_dim=16, sliding_window=16, layer_types=["sliding_attention", "full_attention"]
        ),
        "gpt2": tf.GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=256),
        "mixtral": tf.MixtralConfig(**small, num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    }


LEAN = {"llama", "llama-rope-scaled", "qwen2", "qwen3", "mistral-windowed"}
NAMES = [*tiny_configs(), "toy"]


def build(name: str) -> Case:
    if name == "toy":
        toy = ToyModel(VOCAB, order=3)
        return Case(toy, toy.logits, 0.0)
    from transformers import AutoModelForCausalLM

    torch.manual_seed(len(name))
    config = tiny_configs()[name]
    module = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in module.parameters():
        # The initial weights are so small that every token would look alike.
        torch.nn.init.normal_(parameter, std=0.3)

    @torch.inference_mode()
    def oracle(tokens: list[int]) -> np.ndarray:
        logits: np.ndarray = module(torch.tensor([tokens]), use_cache=False).logits[0, -1].float().numpy()
        return logits

    if name in LEAN:
        weights = {key: value.clone() for key, value in module.state_dict().items()}
        model: SessionModel = LeanDecoder(config, weights, dtype=torch.float32, device=torch.device("cpu"))
    else:
        model = TransformersModel(
            AutoModelForCausalLM.from_config(copy.deepcopy(config)), weights=module.state_dict()
        )
    return Case(model, oracle, 1e-4)


@pytest.fixture(scope="module", params=NAMES)
def case(request: pytest.FixtureRequest) -> Case:
    return build(request.param)


@pytest.fixture
def executor() -> Iterator[Executor]:
    executor = Executor()
    yield executor
    executor.close()


def check(case: Case, row_logits: np.ndarray | None, tokens: list[int]) -> None:
    assert row_logits is not None
    np.testing.assert_allclose(row_logits, case.oracle(tokens), atol=case.tolerance, rtol=0)


def test_every_row_of_a_prefill_equals_the_oracle(case: Case, executor: Executor) -> None:
    tokens = np.random.default_rng(1).integers(0, VOCAB, 90).tolist()
    session = Session(case.model)
    rows = executor.run(executor.submit(session.extend(tokens, LOGITS, chunk=37)))
    assert len(rows) == 89
    for index in (0, 1, 36, 37, 60, 88):
        check(case, rows[index].logits, tokens[: index + 1])


def test_outputs_are_derived_from_the_raw_logits(case: Case, executor: Executor) -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7]
    session = Session(case.model)
    executor.run(executor.submit(session.extend(tokens)))
    wanted = Outputs(argmax=True, top_k=4, entropy=True, logits=True, log_probs_of=(3, 9))
    row = executor.run(executor.submit(session.score(Tree([], []), wanted)))[0]
    logits = case.oracle(tokens).astype(np.float64)
    log_probs = logits - np.logaddexp.reduce(logits)
    best = np.argsort(-logits, kind="stable")
    assert row.argmax == best[0]
    assert row.top_tokens is not None
    assert row.top_tokens.tolist() == best[:4].tolist()
    assert row.top_log_probs is not None
    assert row.log_probs is not None
    np.testing.assert_allclose(row.top_log_probs, log_probs[best[:4]], atol=1e-3)
    np.testing.assert_allclose(row.log_probs, log_probs[[3, 9]], atol=1e-3)
    assert row.entropy == pytest.approx(-(np.exp(log_probs) * log_probs).sum(), abs=1e-3)


def test_a_row_that_wants_nothing_gets_nothing(case: Case, executor: Executor) -> None:
    rows = executor.run(executor.submit(Session(case.model).extend([1, 2, 3])))
    assert [(row.argmax, row.logits, row.top_tokens, row.entropy) for row in rows] == [(None,) * 4] * 2


def test_too_long_a_prompt_is_refused_before_any_work(case: Case, executor: Executor) -> None:
    session = Session(case.model)
    long = [1] * (case.model.context_length + 1)
    with pytest.raises(ContextLengthError, match=f"context holds {case.model.context_length}"):
        executor.run(executor.submit(session.extend(long)))
    assert session.tokens == []
    with pytest.raises(InputError, match="vocabulary"):
        executor.run(executor.submit(session.extend([1, VOCAB])))
    assert session.tokens == []


class Driver:
    """Random operations on several sessions at once, each followed by a comparison with a fresh prefill."""

    def __init__(self, case: Case, data: st.DataObject) -> None:
        self.case = case
        self.draw = data.draw
        self.executor = Executor()
        self.sessions: list[Session] = [Session(case.model)]

    def token_list(self, low: int, high: int) -> list[int]:
        return self.draw(st.lists(st.integers(0, VOCAB - 1), min_size=low, max_size=high))

    def tree(self) -> Tree:
        tokens = self.token_list(0, 7)
        return Tree(tokens, [self.draw(st.integers(-1, node - 1)) for node in range(len(tokens))])

    def all_at_once(self, coroutines: list[Coroutine[Any]]) -> list[Any]:
        return self.executor.run(self.executor.submit(gather(coroutines)))

    def extend(self) -> None:
        parts = [(session, self.token_list(1, 12)) for session in self.sessions]
        self.all_at_once([session.extend(tokens, chunk=5) for session, tokens in parts])

    def score_and_commit(self) -> None:
        trees = [self.tree() for _ in self.sessions]
        scored = self.all_at_once(
            [session.score(tree, LOGITS) for session, tree in zip(self.sessions, trees, strict=True)]
        )
        for session, tree, rows in zip(self.sessions, trees, scored, strict=True):
            check(self.case, rows[0].logits, session.tokens)
            for node in range(len(tree.tokens)):
                path = [node]
                while tree.parents[path[-1]] >= 0:
                    path.append(tree.parents[path[-1]])
                follow = [tree.tokens[step] for step in reversed(path)]
                check(self.case, rows[1 + node].logits, session.tokens + follow)
            path = []
            while True:
                below = [n for n in range(len(tree.tokens)) if tree.parents[n] == (path[-1] if path else -1)]
                if not below or self.draw(st.booleans()):
                    break
                path.append(self.draw(st.sampled_from(below)))
            bonus = self.draw(st.one_of(st.none(), st.integers(0, VOCAB - 1)))
            before = session.tokens + [tree.tokens[step] for step in path]
            session.commit(path, bonus)
            assert session.tokens == before + ([] if bonus is None else [bonus])

    def fork(self) -> None:
        if len(self.sessions) < 4:
            parent = self.draw(st.sampled_from(self.sessions))
            length = self.draw(st.integers(1, len(parent)))
            held = parent.cache.nbytes
            self.sessions.append(parent.fork(length))
            assert self.sessions[-1].cache.nbytes == 0 or isinstance(self.case.model, ToyModel)
            assert parent.cache.nbytes == held

    def truncate(self) -> None:
        session = self.draw(st.sampled_from(self.sessions))
        session.truncate(self.draw(st.integers(1, len(session))))

    def drop(self) -> None:
        if len(self.sessions) > 1:
            self.sessions.pop(self.draw(st.integers(0, len(self.sessions) - 1))).close()

    def close(self) -> None:
        self.executor.close()


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_sequence_of_operations_equals_a_fresh_prefill(case: Case, data: st.DataObject) -> None:
    driver = Driver(case, data)
    try:
        driver.extend()
        for _ in range(data.draw(st.integers(1, 9))):
            operations = ["extend", "score_and_commit", "score_and_commit", "fork", "truncate", "drop"]
            operation = data.draw(st.sampled_from(operations))
            if max(len(session) for session in driver.sessions) < 200:
                getattr(driver, operation)()
        driver.score_and_commit()
    finally:
        driver.close()
