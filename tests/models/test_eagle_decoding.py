"""Decoding with an EAGLE head on networks: the text is plain decoding's, alone and inside methods."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from specrag.engine.executor import run
from specrag.engine.outputs import Outputs
from specrag.engine.passes import gather
from specrag.engine.sampling_params import SamplingParams
from specrag.engine.session import Session
from specrag.engine.stopping import StopConditions
from specrag.errors import InputError, ModelFilesError
from specrag.language_model import LanguageModel
from specrag.methods.base import Decoder, PromptNeeds, read_prompt
from specrag.methods.drafters import NamedDrafter
from specrag.methods.retrieval_decoder import RetrievalDecoder
from specrag.methods.token_decoders import eagle
from specrag.models.decoder import LeanDecoder
from specrag.models.eagle_files import read_head
from specrag.models.eagle_head import EagleHead
from specrag.models.loading import load_model
from specrag.models.toy import ToyModel
from specrag.speculation.decode import Settings
from specrag.speculation.drafters.base import NoDrafter
from specrag.speculation.drafters.eagle import EAGLE, PROMPT_ROWS, Eagle
from tests.models.tiny_eagle import VOCAB, fit_head, tiny_target, write_head
from tests.processor import PACKED_BF16
from tests.speculation.guessing import Budgets, decoding

SAMPLINGS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=0.8, top_p=0.95, seed=5),
    "penalised": SamplingParams(temperature=1.0, top_k=20, repetition_penalty=1.2, seed=6),
}

pytestmark = PACKED_BF16


# -- the drafter alone ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def invariant(request: pytest.FixtureRequest) -> LeanDecoder:
    return tiny_target(request.param, dtype=torch.bfloat16, batch_invariant=True)


@pytest.fixture(scope="module")
def head(invariant: LeanDecoder, tmp_path_factory: pytest.TempPathFactory) -> EagleHead:
    kind = invariant.config.model_type
    folder = write_head(tmp_path_factory.mktemp("head"), kind, invariant.embedding, dtype=torch.bfloat16)
    fit_head(folder, invariant)
    return EagleHead(read_head(folder, invariant.embedding), invariant)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_the_output_is_plain_decodings(
    invariant: LeanDecoder, head: EagleHead, sampling: SamplingParams
) -> None:
    draw = np.random.default_rng(1)
    prompts = [draw.integers(0, VOCAB, length).tolist() for length in (1, 2, 17, 280)]
    wanted = Settings(StopConditions(24), sampling)
    plain = [run(decoding(invariant, prompt, wanted, NoDrafter(), Budgets([0]))) for prompt in prompts]
    texts = run(
        gather(
            [
                decoding(
                    invariant,
                    prompt,
                    wanted,
                    Eagle(head, min_gain=0),
                    Budgets([[24], [7, 0, 12]][number % 2]),
                )
                for number, prompt in enumerate(prompts)
            ]
        )
    )
    assert [text.tokens for text in texts] == [text.tokens for text in plain]
    assert sum(step.accepted for text in texts for step in text.steps) > 4


# -- inside methods -------------------------------------------------------------------------------------------

PROMPTS = ("the quick brown fox the quick brown", "hello hello hello", "a", "tell the tall tale " * 4)


@pytest.fixture(scope="module")
def llm(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECRAG_HOME", str(tmp_path_factory.mktemp("home")))
        return LanguageModel(load_model(tiny_gguf, dtype="bf16", device="cpu", batch_invariant=True))


@pytest.fixture(scope="module")
def head_name(llm: LanguageModel, tmp_path_factory: pytest.TempPathFactory) -> str:
    assert isinstance(llm.model, LeanDecoder)
    folder = write_head(tmp_path_factory.mktemp("head"), "llama", llm.model.embedding, dtype=torch.bfloat16)
    fit_head(folder, llm.model)
    save_file({"tokens": torch.arange(0, llm.model.vocab_size, 2)}, folder / "draft_vocabulary.safetensors")
    return str(folder)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("kind", ["eagle-2", "respec", "respec-paper"])
def test_methods_give_plain_decodings_text(
    llm: LanguageModel, head_name: str, kind: str, temperature: float
) -> None:
    methods: dict[str, Decoder] = {
        "eagle-2": eagle(head_name),
        "respec": RetrievalDecoder(drafter=f"eagle:{head_name}"),
        "respec-paper": RetrievalDecoder(drafter=f"eagle:{head_name}", cost_aware=False),
    }
    method = methods[kind]
    assert method.prompt_needs.features == PROMPT_ROWS
    plain = llm.batch(
        PROMPTS, temperature=temperature, seed=3, max_tokens=32, ignore_eos=True, method="plain"
    )
    found = llm.batch(PROMPTS, temperature=temperature, seed=3, max_tokens=32, ignore_eos=True, method=method)
    for each, right in zip(found, plain, strict=True):
        assert [token.token for token in each.tokens] == [token.token for token in right.tokens]
        assert each.text == right.text
    if kind != "respec":  # which weighs guesses by measured time
        assert sum(each.usage.accepted_by.get(EAGLE, 0) for each in found) > 0


def test_a_method_reads_features_of_many_rows_and_more_of_few() -> None:
    model = ToyModel()
    prompt = [3, 1, 4, 1, 0, 2, 0, 4, 3]
    needs = PromptNeeds(2, Outputs(entropy=True, hidden=("final",)), features=5)
    rows = run(read_prompt(Session(model), prompt, needs))
    assert len(rows) == 5
    assert [row.entropy is not None for row in rows] == [False] * 3 + [True] * 2
    for place, row in enumerate(rows):
        np.testing.assert_array_equal(row.hidden["final"], model.logits(prompt[: 4 + place]))
    assert len(run(read_prompt(Session(model), prompt[:3], needs))) == 2
    assert len(run(read_prompt(Session(model), prompt, PromptNeeds(features=4)))) == 4


def test_a_head_that_cannot_be_used_ends_a_request_before_any_work(
    llm: LanguageModel, head_name: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="eagle:NAME"):
        RetrievalDecoder(drafter="eagle:")
    with pytest.raises(InputError, match="no-such-head"):
        llm.generate("hello", method=RetrievalDecoder(drafter="eagle:no-such-head"))
    other = write_head(tmp_path / "other", "llama", torch.zeros(9, 32), dtype=torch.float32)
    with pytest.raises(InputError, match="hidden_size 32"):
        llm.generate("hello", method=eagle(str(other)))
    (other / "model.safetensors").unlink()
    with pytest.raises((InputError, ModelFilesError)):
        llm.generate("hello", method=eagle(str(other)))


def test_a_head_is_loaded_once_for_all_requests(llm: LanguageModel, head_name: str) -> None:
    named = NamedDrafter(f"eagle:{head_name}")
    named.check(llm.loaded)
    first = named.make(llm.model)
    named.check(llm.loaded)
    second = named.make(llm.model)
    assert isinstance(first, Eagle)
    assert isinstance(second, Eagle)
    assert first._head is second._head
    assert named.outputs == Eagle.outputs
