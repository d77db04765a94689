"""Sentence encoders: the lean BERT against sentence-transformers, reduced precision, independence of the batch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer

from scripts.sample_data import wikipedia_summaries
from specrag.errors import InputError, ModelFilesError, SpecragError
from specrag.models import catalog
from specrag.retrieval.encoder.bert import Bert
from specrag.retrieval.encoder.encoder import Encoder, SentenceTransformersNetwork, load_encoder
from tests.retrieval.encoder.tiny_networks import write_encoder, write_json

TEXTS = 240


@pytest.fixture(scope="module")
def minilm(model_home: Path) -> Path:
    return catalog.resolve("minilm-l6-v2").folder


@pytest.fixture(scope="module")
def encoder(minilm: Path) -> Encoder:
    return load_encoder(device="cpu")


@pytest.fixture(scope="module")
def exact(minilm: Path) -> Encoder:
    return load_encoder(dtype="fp32", device="cpu")


@pytest.fixture(scope="module")
def articles(model_home: Path) -> list[dict[str, str]]:
    """Real articles with a description each, of all lengths, evenly spread over the sample."""
    lines = wikipedia_summaries().read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines[:: len(lines) // TEXTS]]
    return [row for row in rows if row.get("description")][:TEXTS]


@pytest.fixture(scope="module")
def passages(articles: list[dict[str, str]]) -> list[str]:
    return [f"{row['title']}\n{row['text'][:240]}" for row in articles]


@pytest.fixture(scope="module")
def exact_vectors(exact: Encoder, passages: list[str]) -> np.ndarray:
    return exact.encode_passages(passages)


def cosines(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    return np.asarray((left.astype(np.float64) * right).sum(axis=1))


def test_the_lean_forward_is_sentence_transformers_in_fp32(
    minilm: Path, exact: Encoder, articles: list[dict[str, str]]
) -> None:
    long = " ".join(row["text"] for row in articles[:6])  # cut at the model's most tokens
    texts = ["", "a", long, *(row["text"] for row in articles[:12])]
    oracle = SentenceTransformer(str(minilm), device="cpu").encode(texts)
    assert isinstance(exact.network, Bert)
    found = exact.encode_passages(texts)
    assert found.dtype == np.float32
    assert found.shape == (len(texts), exact.dimension)
    assert cosines(found, oracle).min() > 0.99999
    assert np.abs(found - oracle).max() < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "cosine", "agreement"), [("bf16", 0.9997, 0.99), ("int8", 0.99, 0.97)])
def test_fewer_bits_change_no_ranking_that_matters(
    dtype: str,
    cosine: float,
    agreement: float,
    exact: Encoder,
    articles: list[dict[str, str]],
    passages: list[str],
    exact_vectors: np.ndarray,
) -> None:
    """Questions are the articles' descriptions; where the best passage changes, the two were a near tie."""
    encoder = load_encoder(dtype=dtype, device="cpu")
    questions = [row["description"] for row in articles]
    vectors = encoder.encode_passages(passages)
    assert cosines(vectors, exact_vectors).min() > cosine
    exact_scores = exact.encode_passages(questions) @ exact_vectors.T
    scores = encoder.encode_passages(questions) @ vectors.T
    best, found = exact_scores.argmax(axis=1), scores.argmax(axis=1)
    assert (best == found).mean() >= agreement
    rows = np.arange(len(questions))
    lost = exact_scores[rows, best] - exact_scores[rows, found]
    assert lost.max() < 2 * (1 - cosine) + 0.01
    right = np.arange(len(questions))
    assert abs((best == right).mean() - (found == right).mean()) <= 0.01


def test_a_query_has_the_same_bits_in_any_company(encoder: Encoder, articles: list[dict[str, str]]) -> None:
    questions = [row["description"] for row in articles[:24]]
    together = encoder.encode_queries(questions)
    alone = np.concatenate([encoder.encode_queries([question]) for question in questions])
    assert together.tobytes() == alone.tobytes()
    assert encoder.encode_queries(questions[::-1])[::-1].tobytes() == alone.tobytes()


def test_vectors_come_in_the_order_of_the_texts(
    encoder: Encoder, passages: list[str], exact_vectors: np.ndarray
) -> None:
    """Encoding sorts by length: nothing of that may show."""
    turned = encoder.encode_passages(passages[59::-1])[::-1]
    assert cosines(turned, exact_vectors[:60]).min() > 0.9997


def test_vectors_have_unit_length(encoder: Encoder, passages: list[str]) -> None:
    lengths = np.linalg.norm(encoder.encode_passages(passages[:40]).astype(np.float64), axis=1)
    assert np.abs(lengths - 1).max() < 1e-6


def test_progress_adds_up(encoder: Encoder, passages: list[str]) -> None:
    steps: list[int] = []
    encoder.encode_passages(passages[:90], steps.append)
    assert sum(steps) == 90
    assert len(steps) > 1


def test_nothing_gives_nothing(encoder: Encoder) -> None:
    for found in (encoder.encode_passages([]), encoder.encode_queries([])):
        assert found.shape == (0, 384)
        assert found.dtype == np.float32


def test_texts_that_no_tokenizer_takes_are_encoded_all_the_same(encoder: Encoder) -> None:
    odd = ["", "   ", "\ud800 half a pair", "\x00", "𒀀" * 400, "word " * 5000]
    found = encoder.encode_passages(odd)
    assert np.isfinite(found).all()
    assert np.linalg.norm(found, axis=1) == pytest.approx(np.ones(len(odd)), abs=1e-5)


@pytest.mark.parametrize("texts", ["one text", [1], ["a", None], [b"bytes"]])
def test_what_is_no_text_is_named(encoder: Encoder, texts: Any) -> None:
    for encode in (encoder.encode_passages, encoder.encode_queries):
        with pytest.raises(InputError, match="texts"):
            encode(texts)


# -- other models ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bert", "distilbert"])
@pytest.mark.parametrize("pooling", ["mean", "cls", "max"])
@pytest.mark.parametrize("include_prompt", [True, False])
def test_pooling_and_prompts_are_the_models_own(
    kind: str, pooling: str, include_prompt: bool, minilm: Path, tmp_path: Path
) -> None:
    prompts = {"query": "question: ", "document": "passage: "}
    folder = write_encoder(
        tmp_path / "tiny",
        minilm,
        kind=kind,
        pooling=pooling,
        prompts=prompts,
        include_prompt=include_prompt,
    )
    oracle = SentenceTransformer(str(folder), device="cpu")
    encoder = load_encoder(str(folder), dtype="fp32", device="cpu")
    assert isinstance(encoder.network, Bert) == (kind == "bert" and pooling != "max" and include_prompt)
    assert encoder.max_tokens == 64
    texts = ["what is copper", "a metal", "copper is a metal with the symbol Cu " * 20]
    assert np.abs(encoder.encode_queries(texts) - oracle.encode_query(texts)).max() < 1e-5
    assert np.abs(encoder.encode_passages(texts) - oracle.encode_document(texts)).max() < 1e-5


def test_e5_is_asked_as_it_was_trained(minilm: Path, tmp_path: Path) -> None:
    plain = load_encoder(str(write_encoder(tmp_path / "tiny", minilm)), dtype="fp32", device="cpu")
    e5 = load_encoder(
        str(write_encoder(tmp_path / "multilingual-e5-small", minilm)), dtype="fp32", device="cpu"
    )
    for asked, prompted in (("copper", "query: copper"), ("zinc", "query: zinc")):
        assert np.abs(e5.encode_queries([asked]) - plain.encode_queries([prompted])).max() < 1e-6
    found, expected = e5.encode_passages(["copper"]), plain.encode_passages(["passage: copper"])
    assert np.abs(found - expected).max() < 1e-6


def test_sentence_transformers_serves_other_networks_in_bf16(minilm: Path, tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "tiny", minilm, kind="distilbert")
    encoder = load_encoder(str(folder), device="cpu")
    assert isinstance(encoder.network, SentenceTransformersNetwork)
    steps: list[int] = []
    found = encoder.encode_passages(["copper", "a metal"] * 4, steps.append)
    assert sum(steps) == 8
    assert np.abs(np.linalg.norm(found, axis=1) - 1).max() < 1e-6
    texts = ["copper", "a longer question", "zinc"]
    alone = np.concatenate([encoder.encode_queries([text]) for text in texts])
    assert encoder.encode_queries(texts).tobytes() == alone.tobytes()
    with pytest.raises(InputError, match="8-bit"):
        load_encoder(str(folder), dtype="int8", device="cpu")


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.text(max_size=60), min_size=1, max_size=12))
def test_a_text_has_one_vector_whatever_stands_beside_it(minilm: Path, texts: list[str]) -> None:
    encoder = _tiny(minilm)
    together = encoder.encode_passages(texts)
    alone = np.concatenate([encoder.encode_passages([text]) for text in texts])
    assert np.abs(together - alone).max() < 1e-5


_TINY: dict[Path, Encoder] = {}


def _tiny(minilm: Path) -> Encoder:
    if minilm not in _TINY:
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            _TINY[minilm] = load_encoder(str(write_encoder(Path(folder), minilm)), dtype="fp32", device="cpu")
    return _TINY[minilm]


def test_without_a_stated_length_positions_bound_it(minilm: Path, tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "tiny", minilm, max_tokens=None)
    assert load_encoder(str(folder), device="cpu").max_tokens == 128


# -- the fingerprint ------------------------------------------------------------------------------------------


def test_the_fingerprint_names_what_changes_vectors(minilm: Path, tmp_path: Path) -> None:
    def fingerprint(folder: Path, dtype: str = "bf16") -> str:
        return load_encoder(str(folder), dtype=dtype, device="cpu").fingerprint

    base = write_encoder(tmp_path / "a", minilm)
    first = fingerprint(base)
    shutil.copytree(base, tmp_path / "copy")
    assert fingerprint(tmp_path / "copy") == first, "the same model elsewhere"
    weights = load_file(base / "model.safetensors")
    weights["embeddings.LayerNorm.bias"][0] += 1
    shutil.copytree(base, tmp_path / "tuned")
    save_file(weights, tmp_path / "tuned" / "model.safetensors", metadata={"format": "pt"})
    others = [
        fingerprint(base, "fp32"),
        fingerprint(base, "int8"),
        fingerprint(write_encoder(tmp_path / "b", minilm, max_tokens=32)),
        fingerprint(write_encoder(tmp_path / "c", minilm, prompts={"query": "q: "})),
        fingerprint(write_encoder(tmp_path / "d", minilm, prompts={"document": "q: "})),
        fingerprint(write_encoder(tmp_path / "e", minilm, pooling="cls")),
        fingerprint(tmp_path / "tuned"),
    ]
    assert len({first, *others}) == len(others) + 1


def test_the_catalogs_checksums_give_the_same_fingerprint_as_the_files(
    minilm: Path, encoder: Encoder, tmp_path: Path
) -> None:
    shutil.copytree(minilm, tmp_path / "copy")
    assert load_encoder(str(tmp_path / "copy"), device="cpu").fingerprint == encoder.fingerprint


def test_an_encoder_is_found_again_by_its_name(
    minilm: Path, encoder: Encoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert encoder.name == "minilm-l6-v2"
    write_encoder(tmp_path / "tiny", minilm)
    monkeypatch.chdir(tmp_path)
    found = load_encoder("./tiny", device="cpu")
    monkeypatch.chdir("/")
    assert load_encoder(found.name, device="cpu").fingerprint == found.fingerprint
    assert encoder.tokenizer_file.is_file()


# -- what cannot be used --------------------------------------------------------------------------------------


def _no_modules(folder: Path) -> None:
    (folder / "modules.json").unlink()


def _foreign_module(folder: Path) -> None:
    modules = json.loads((folder / "modules.json").read_text())
    modules[1]["type"] = "pooling_of_mine.Pooling"
    write_json(folder / "modules.json", modules)


def _leaving_module(folder: Path) -> None:
    modules = json.loads((folder / "modules.json").read_text())
    modules[1]["path"] = "../elsewhere"
    write_json(folder / "modules.json", modules)


def _pickled_module(folder: Path) -> None:
    (folder / "1_Pooling" / "pytorch_model.bin").write_bytes(b"\x80\x04")


def _pickled_weights(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _torn_weights(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])


def _missing_tensor(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["encoder.layer.1.output.dense.bias"]
    save_file(weights, folder / "model.safetensors")


def _torn_modules(folder: Path) -> None:
    (folder / "modules.json").write_text('[{"idx": 0,')


def _no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (_no_modules, InputError, "no sentence encoder"),
        (_foreign_module, InputError, "never run"),
        (_leaving_module, ModelFilesError, "damaged"),
        (_pickled_module, ModelFilesError, "pickle"),
        (_pickled_weights, ModelFilesError, "pickle"),
        (_torn_weights, ModelFilesError, "truncated or damaged"),
        (_missing_tensor, ModelFilesError, r"encoder\.layer\.1\.output\.dense\.bias"),
        (_torn_modules, ModelFilesError, "damaged"),
        (_no_tokenizer, ModelFilesError, r"tokenizer\.json"),
    ],
)
def test_a_spoilt_folder_is_a_line_not_a_traceback(
    spoil: Callable[[Path], None], error: type[SpecragError], message: str, minilm: Path, tmp_path: Path
) -> None:
    folder = write_encoder(tmp_path / "tiny", minilm)
    spoil(folder)
    with pytest.raises(error, match=message) as caught:
        load_encoder(str(folder), device="cpu")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "dtype", "message"),
    [
        ("minilm", "bf16", "did you mean 'minilm-l6-v2'"),
        ("smollm2-135m", "bf16", "no sentence encoder"),
        ("", "bf16", "encoder"),
        ("./no/such/folder", "bf16", "no such folder"),
        ("minilm-l6-v2", "fp8", "encoder_dtype"),
    ],
)
def test_a_name_or_type_that_cannot_be_used_is_named(
    name: str, dtype: str, message: str, smollm2: Path
) -> None:
    with pytest.raises(InputError, match=message):
        load_encoder(name, dtype=dtype, device="cpu")
