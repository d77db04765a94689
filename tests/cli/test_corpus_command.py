"""A corpus from the command line: made of documents, copied from, and refused to another tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specrag.errors import SpecragError
from tests.cli.test_knn_command import run

PROMPT = "The ferryman of Brodno keeps nine lanterns, and each lantern has the name"
LINE = "The ferryman of Brodno keeps nine lanterns, and each lantern has the name of a drowned village."


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("documents")
    (folder / "brodno.txt").write_text(LINE, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def corpus(documents: Path, smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "corpus"
    made = json.loads(run("index", str(documents), "--corpus", "--kb", str(folder), "--json"))
    assert (made["texts"], made["skipped"]) == (1, [])
    assert made["tokens"] > 15
    return folder


def generate(*words: str) -> dict[str, object]:
    options = ("--raw", "--max-tokens", "12", "-o", "dtype=fp32", "--json")
    answer: dict[str, object] = json.loads(run("generate", PROMPT, *options, *words))
    return answer


def test_respec_copies_from_it_and_writes_the_same_text(corpus: Path) -> None:
    plain = generate("--method", "plain")
    copied = generate("-o", f"corpus={corpus}")
    assert copied["text"] == plain["text"]
    usage = copied["usage"]
    assert isinstance(usage, dict)
    assert usage["drafted_by"]["corpus"] > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("generate", "Hello", "--method", "plain", "-o", "corpus={corpus}"),
            "-o corpus.*plain takes no options",
        ),
        (("generate", "Hello", "-o", "corpus={documents}"), "there is no corpus"),
        (("index", "{documents}", "--corpus", "--kb", "{documents}"), "holds other files"),
        (("index", "{documents}", "--corpus", "--knn-lm", "--kb", "x"), "leave it or --knn-lm out"),
        (("index", "{documents}", "--corpus", "--kb", "x", "--encoder", "e"), "leave it out with --corpus"),
        (("index", "{documents}", "--corpus", "--kb", "x", "--window", "9"), "leave it out with --corpus"),
    ],
)
def test_what_does_not_go_together_is_refused(
    words: tuple[str, ...], message: str, corpus: Path, documents: Path
) -> None:
    with pytest.raises(SpecragError, match=message):
        run(*(word.format(corpus=corpus, documents=documents) for word in words))
    assert (documents / "brodno.txt").read_text(encoding="utf-8") == LINE


def test_a_corpus_of_another_tokenizer_is_refused(corpus: Path, tmp_path: Path) -> None:
    other = tmp_path / "corpus"
    other.mkdir()
    for file in corpus.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    manifest = json.loads((other / "manifest.json").read_text())
    (other / "manifest.json").write_text(json.dumps({**manifest, "tokenizer": "another"}))
    with pytest.raises(SpecragError, match="build one for this model"):
        run("generate", "Hello", "--max-tokens", "2", "-o", f"corpus={other}")
