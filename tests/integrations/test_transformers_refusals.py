"""What speculation inside transformers' ``generate`` refuses, and that an error leaves the module as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf

from specrag.errors import InputError
from specrag.integrations.transformers import Speculate, speculate
from specrag.methods.retrieval_decoder import RetrievalDecoder
from tests.integrations.small_modules import ROW, VOCAB, batch, build, check_equal


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"num_beams": 2}, "num_beams"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "generation mode"),
        ({"prompt_lookup_num_tokens": 4}, "generation mode"),
        ({"return_dict_in_generate": True, "output_scores": True}, "output_scores"),
        ({"return_dict_in_generate": True, "output_attentions": True}, "output_attentions"),
        ({"guidance_scale": 1.5}, "logits processor"),
        ({"position_ids": torch.arange(3, 13)[None]}, "position_ids"),
        ({"past_key_values": tf.DynamicCache()}, "past_key_values"),
        ({"attention_mask": torch.tensor([[1] * 9 + [0]])}, "attention_mask"),
        ({"attention_mask": torch.tensor([[0, 1, 0, 1, 1, 1, 1, 1, 1, 1]])}, "attention_mask"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_options_that_cannot_be_used(
    llama: Any, guessing: Speculate, options: dict[str, Any], field: str
) -> None:
    passes: list[int] = []
    hook = llama.base_model.register_forward_pre_hook(lambda *_: passes.append(1))
    try:
        with pytest.raises(InputError) as caught:
            llama.generate(**{**batch(ROW), **options}, max_new_tokens=4, custom_generate=guessing)
    finally:
        hook.remove()
    assert caught.value.field == field
    assert not passes


def test_other_inputs_and_assistants_cannot_be_used(llama: Any, guessing: Speculate) -> None:
    with pytest.raises(InputError, match="generation mode"):
        llama.generate(
            **batch(ROW), max_new_tokens=4, assistant_model=build("llama"), custom_generate=guessing
        )
    embedded = llama.get_input_embeddings()(torch.tensor([ROW])).detach()
    with pytest.raises(InputError, match=r"inputs_embeds|attention_mask"):
        llama.generate(inputs_embeds=embedded, max_new_tokens=4, custom_generate=guessing)


@pytest.mark.parametrize("name", ["granite", "bloom", "mamba"])
def test_architectures_that_do_something_else_are_refused(name: str, guessing: Speculate) -> None:
    module = build(name)
    with pytest.raises(InputError, match="custom_generate"):
        module.generate(**batch(ROW), max_new_tokens=4, custom_generate=guessing)
    assert module.generate(**batch(ROW), max_new_tokens=4).shape == (1, len(ROW) + 4)


def test_encoder_decoders_are_refused(guessing: Speculate) -> None:
    config = tf.T5Config(
        vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, decoder_start_token_id=0
    )
    with pytest.raises(InputError, match="encoder-decoder"):
        tf.T5ForConditionalGeneration(config).generate(
            torch.tensor([ROW]), max_new_tokens=4, custom_generate=guessing
        )


def test_an_error_gives_the_module_back(llama: Any, guessing: Speculate) -> None:
    def broken(row: int, tokens: torch.Tensor) -> list[int]:
        raise RuntimeError("the caller's own")

    with pytest.raises(RuntimeError, match="the caller's own"):
        llama.generate(
            **batch(ROW), max_new_tokens=4, prefix_allowed_tokens_fn=broken, custom_generate=guessing
        )
    check_equal(llama, guessing, batch(ROW), max_new_tokens=4)


def test_methods_are_checked_when_they_are_given(llama: Any) -> None:
    with pytest.raises(InputError, match="did you mean respec"):
        speculate("respect")
    with pytest.raises(InputError, match="method"):
        speculate(7)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"tokenizer\.json"):
        llama.generate(
            **batch(ROW),
            max_new_tokens=4,
            custom_generate=speculate(RetrievalDecoder(drafter="model:smollm2-135m")),
        )
