"""Rerankers: scores equal those of transformers' own classifier, each pair for itself; safe files only."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from specrag.errors import InputError, ModelFilesError, SpecragError
from specrag.models import catalog
from specrag.retrieval.encoder.reranker import Reranker, load_reranker
from tests.retrieval.encoder.tiny_networks import write_cross_encoder, write_encoder

QUESTION = "which metal conducts heat best"
TEXTS = [
    "Copper is a soft metal with very high thermal conductivity.",
    "A ferry crosses the strait twice a day.",
    "",
    "silver " * 300,
    "Zinc.",
]


@pytest.fixture(scope="module")
def minilm(model_home: Path) -> Path:
    return catalog.resolve("minilm-l6-v2").folder


@pytest.fixture(scope="module")
def folder(minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cross_encoder(tmp_path_factory.mktemp("reranker"), minilm)


@pytest.fixture(scope="module")
def reranker(folder: Path) -> Reranker:
    return load_reranker(str(folder), device="cpu")


def test_a_score_is_the_classifiers(reranker: Reranker, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    expected = []
    for text in TEXTS:
        pair = tokenizer([QUESTION], [text], truncation="longest_first", max_length=128, return_tensors="pt")
        with torch.no_grad():
            expected.append(torch.sigmoid(model(**pair).logits)[0, 0].item())
    found = reranker.score(QUESTION, TEXTS)
    assert found.dtype == np.float32
    assert found == pytest.approx(np.array(expected), abs=1e-5)
    assert np.ptp(found) > 0.01, "a network that says the same of every pair would show nothing"


def test_a_pair_has_its_score_in_any_company(reranker: Reranker) -> None:
    together = reranker.score(QUESTION, TEXTS)
    alone = np.concatenate([reranker.score(QUESTION, [text]) for text in TEXTS])
    assert together.tobytes() == alone.tobytes()
    assert reranker.score(QUESTION, TEXTS[::-1])[::-1].tobytes() == alone.tobytes()


def test_bf16_is_close(folder: Path, reranker: Reranker) -> None:
    found = load_reranker(str(folder), dtype="bf16", device="cpu").score(QUESTION, TEXTS)
    assert found == pytest.approx(reranker.score(QUESTION, TEXTS), abs=0.05)


def test_nothing_gives_nothing(reranker: Reranker) -> None:
    assert reranker.score(QUESTION, []).shape == (0,)


def test_half_a_pair_of_surrogates_is_scored(reranker: Reranker) -> None:
    assert np.isfinite(reranker.score("\ud800", ["\udc00 half"])).all()


@pytest.mark.parametrize(
    ("question", "texts"), [(1, ["a"]), ("a", "text"), ("a", [None]), (None, ["a"]), ("a", ["b", 2])]
)
def test_what_is_no_text_is_named(reranker: Reranker, question: Any, texts: Any) -> None:
    with pytest.raises(InputError, match=r"question|texts"):
        reranker.score(question, texts)


def _pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _torn(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])


def _foreign(folder: Path) -> None:
    (folder / "modules.json").write_text(json.dumps([{"path": "", "type": "mine.CrossEncoder"}]))


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (_pickled, ModelFilesError, "pickle"),
        (_torn, ModelFilesError, "cannot load"),
        (_foreign, InputError, "never run"),
    ],
)
def test_a_spoilt_folder_is_a_line_not_a_traceback(
    spoil: Callable[[Path], None], error: type[SpecragError], message: str, minilm: Path, tmp_path: Path
) -> None:
    folder = write_cross_encoder(tmp_path / "model", minilm)
    spoil(folder)
    with pytest.raises(error, match=message) as caught:
        load_reranker(str(folder), device="cpu")
    assert "\n" not in str(caught.value)


def test_what_gives_no_single_score_is_refused(minilm: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="3 labels"):
        load_reranker(str(write_cross_encoder(tmp_path / "three", minilm, labels=3)), device="cpu")
    with pytest.raises(InputError, match="no cross-encoder"):
        load_reranker(str(write_encoder(tmp_path / "encoder", minilm)), device="cpu")


@pytest.mark.parametrize(
    ("name", "dtype", "message"),
    [("", "fp32", "reranker"), ("no-such-model", "fp32", "model"), ("x", "fp8", "reranker_dtype")],
)
def test_a_name_or_type_that_cannot_be_used_is_named(name: str, dtype: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_reranker(name, dtype=dtype, device="cpu")
