"""Networks of a few thousand random weights in the published forms: real files that load in a moment."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    DistilBertConfig,
    DistilBertModel,
)

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json")
_MODULES = ("Transformer", "Pooling", "Normalize")


def write_json(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def write_encoder(
    folder: Path,
    minilm: Path,
    *,
    kind: str = "bert",
    pooling: str = "mean",
    prompts: Mapping[str, str] | None = None,
    max_tokens: int | None = 64,
    include_prompt: bool = True,
) -> Path:
    """Write a sentence encoder with MiniLM's tokenizer; ``kind`` is ``bert`` or ``distilbert``."""
    _seed(folder)
    model: Any
    if kind == "bert":
        model = BertModel(_bert_config())
    else:
        config = DistilBertConfig(vocab_size=30522, dim=32, n_layers=2, n_heads=4, hidden_dim=64)
        model = DistilBertModel(config)
    model.save_pretrained(folder)
    _copy_tokenizer(minilm, folder)
    write_json(
        folder / "modules.json",
        [
            {
                "idx": number,
                "name": str(number),
                "path": f"{number}_{name}" if number else "",
                "type": f"sentence_transformers.models.{name}",
            }
            for number, name in enumerate(_MODULES)
        ],
    )
    flags = {"cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens"}
    write_json(
        folder / "1_Pooling" / "config.json",
        {"word_embedding_dimension": 32, "include_prompt": include_prompt}
        | {f"pooling_mode_{flag}": name == pooling for name, flag in flags.items()},
    )
    (folder / "2_Normalize").mkdir()
    if max_tokens is not None:
        write_json(
            folder / "sentence_bert_config.json", {"max_seq_length": max_tokens, "do_lower_case": False}
        )
    write_json(folder / "config_sentence_transformers.json", {"prompts": dict(prompts or {})})
    return folder


def write_cross_encoder(folder: Path, minilm: Path, *, labels: int = 1) -> Path:
    """Write a cross-encoder with random weights and MiniLM's tokenizer."""
    _seed(folder)
    config = _bert_config()
    config.num_labels = labels
    model = BertForSequenceClassification(config)
    model.save_pretrained(folder)
    _copy_tokenizer(minilm, folder)
    return folder


def _bert_config() -> BertConfig:
    return BertConfig(
        vocab_size=30522,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=128,
        initializer_range=0.5,
    )


def _seed(folder: Path) -> None:
    torch.manual_seed(11)
    folder.mkdir(parents=True, exist_ok=True)


def _copy_tokenizer(minilm: Path, folder: Path) -> None:
    for name in _TOKENIZER:
        shutil.copyfile(minilm / name, folder / name)
