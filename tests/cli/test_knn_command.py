"""``specrag index --knn-lm``, ``generate --method knn-lm`` and ``perplexity``: the whole way, and everything wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specrag.cli import main as frame
from specrag.errors import SpecragError

TEXT = (
    "The copper mine lies in the north of the valley. The copper mine was opened in 1902. "
    "The copper mine was closed in 1967, when the price of copper fell. "
) * 3
PROMPT = "The copper mine was"


def run(*words: str) -> str:
    """What a command prints; raises its errors."""
    result = CliRunner().invoke(frame.app, list(words))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "mine.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def store(text: Path, smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stores") / "store"
    built = json.loads(run("index", str(text), "--knn-lm", "--kb", str(folder), "--json"))
    assert built["documents"] == 1
    assert built["encoded"] == built["entries"] > 90
    assert json.loads(run("index", str(text), "--knn-lm", "--kb", str(folder), "--json"))["encoded"] == 0
    return folder


def generate(store: Path, *words: str) -> dict[str, object]:
    options = ("--method", "knn-lm", "-o", f"datastore={store}", "--raw", "--max-tokens", "16", "--json")
    own = [part for word in words for part in ("-o", word)]
    found: dict[str, object] = json.loads(run("generate", PROMPT, *options, *own))
    return found


def test_speculation_prints_the_same_text_with_neighbours(store: Path) -> None:
    words = ("k=8", "weight=0.9", "knn_temperature=10", "batch_invariant=true")
    expected = generate(store, *words, "stride=sequential")
    assert expected["method"] == "knn-lm"
    assert any(year in str(expected["text"]) for year in ("1902", "1967"))  # only the datastore knows
    for stride in ("4", "os3"):
        found = generate(store, *words, f"stride={stride}", "asynchronous=true")
        assert found["text"] == expected["text"]
    usage = found["usage"]
    assert isinstance(usage, dict)
    assert usage["accepted_by"].keys() <= {"knn-cache"}
    sampled = ("temperature=0.8", "seed=3")
    one = generate(store, *words, *sampled, "stride=sequential")
    assert one["text"] == generate(store, *words, *sampled, "stride=6")["text"]


def test_perplexity_falls_with_a_datastore_of_the_text(store: Path, text: Path) -> None:
    alone = json.loads(run("perplexity", str(text), "--json"))
    both = json.loads(run("perplexity", str(text), "--datastore", str(store), "--sweep", "--json"))
    assert both["perplexity"] == pytest.approx(alone["perplexity"])
    assert both["best"]["perplexity"] < 0.5 * both["perplexity"]
    assert both["tokens"] == alone["tokens"] == both["mixture"]["k"]
    shown = run("perplexity", str(text), "--datastore", str(store), "-o", "k=8", "--tokens", "40")
    assert "with neighbours:" in shown
    assert "tokens:          39" in shown


def test_options_that_do_not_fit_are_named(store: Path, text: Path, tmp_path: Path) -> None:
    knn = ("generate", "hello", "--method", "knn-lm")
    here = ("-o", f"datastore={store}")
    cases: list[tuple[tuple[str, ...], str]] = [
        ((*knn,), "datastore: None .* a folder made by specrag index --knn-lm"),
        ((*knn, "-o", f"datastore={tmp_path / 'none'}"), "does not exist"),
        ((*knn, *here, "-o", "k=1025"), "from 1 to 1,024"),
        ((*knn, *here, "-o", "k=1000"), "the number of the datastore's entries"),
        ((*knn, *here, "-o", "weight=1.5"), "-o weight: '1.5' is not usable: give a number from 0 to 1"),
        ((*knn, *here, "-o", "knn_temperature=0"), "above 0"),
        ((*knn, *here, "-o", "knn_reach=0"), "above 0"),
        (("generate", "hello", "-o", "knn_reach=5"), "-o knn_reach"),
        ((*knn, *here, "-o", "index=hnsw"), "built without it"),
        ((*knn, *here, "-o", "stride=0"), "-o stride"),
        ((*knn, *here, "-o", "stride=sequential", "-o", "asynchronous=true"), "asynchronous: True"),
        ((*knn, *here, "-o", "stride=sequential", "-o", "decoder=respec"), "decoder: 'respec'"),
        ((*knn, *here, "-o", "decoder=respeck"), "did you mean respec"),
        (("generate", "hello", "-o", "decoder=respec"), "-o decoder"),
        ((*knn, *here, "-o", "drafter=lookup"), "-o drafter"),
        ((*knn, *here, "-o", "dtype=fp32"), "dtype: 'fp32' does not fit"),
        (("generate", "hello", *here), "-o datastore"),
        (("perplexity", str(text), "-o", "k=4"), "add --datastore"),
        (("perplexity", str(text), "--tokens", "1"), "--tokens"),
        (("perplexity", str(tmp_path / "none.txt")), "no such file"),
        (("perplexity", str(text), "--window", "100000"), "context holds"),
        (("index", str(text), "--kb", str(tmp_path / "kb"), "--window", "64"), "add --knn-lm"),
        (("index", str(text), "--knn-lm", "--kb", str(tmp_path / "kb"), "--encoder", "x"), "--encoder"),
        (("index", str(text), "--knn-lm", "--kb", str(text)), "give a folder"),
        (("index", str(text), "--knn-lm", "--kb", str(tmp_path / "kb"), "--window", "1"), "window"),
        (("index", str(text), "--knn-lm", "--kb", str(store), "--window", "64"), "was made with"),
        (("index", str(text), "--knn-lm", "--kb", str(store), "--pq"), "needs 10,240 entries"),
    ]
    for words, message in cases:
        with pytest.raises(SpecragError, match=message):
            run(*words)
    assert not (tmp_path / "kb" / "manifest.json").exists()
    generate(store, "k=4")  # nothing was lost


def test_datastore_of_another_model_is_refused(store: Path, text: Path) -> None:
    manifest = store / "manifest.json"
    whole = manifest.read_text(encoding="utf-8")
    changed = json.loads(whole)
    changed["model"]["fingerprint"] = "another"
    manifest.write_text(json.dumps(changed), encoding="utf-8")
    try:
        for words in (
            ("generate", "hello", "--method", "knn-lm", "-o", f"datastore={store}"),
            ("perplexity", str(text), "--datastore", str(store)),
            ("index", str(text), "--knn-lm", "--kb", str(store)),
        ):
            with pytest.raises(SpecragError, match="is not the one that made"):
                run(*words)
    finally:
        manifest.write_text(whole, encoding="utf-8")


def test_a_cut_key_file_is_refused_in_one_line(store: Path) -> None:
    (keys,) = (store / "generations").rglob("keys.f16")
    whole = keys.read_bytes()
    keys.write_bytes(whole[: len(whole) // 2])
    try:
        with pytest.raises(SpecragError, match=r"keys\.f16' has [\d,]+ bytes, not"):
            run("generate", "hello", "--method", "knn-lm", "-o", f"datastore={store}")
    finally:
        keys.write_bytes(whole)
