"""Passages that were read when their knowledge base was made: what is found, by whom, and what is read anew."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import specrag
from specrag import LanguageModel, Result, StandardRAG
from specrag.engine.prefix_file import PrefixFileError
from specrag.methods import block_files
from specrag.methods.block_files import ReadReport, read_passages
from specrag.methods.blocks import alone, passage_tokens, template_head
from specrag.retrieval.build import build, remove
from specrag.retrieval.knowledge_base import KnowledgeBase
from specrag.retrieval.read_passages import READ
from tests.cli.shell import specrag as command
from tests.retrieval.library import encoder
from tests.sample import SUMMARIES

QUESTION = "What is said here?"
BLOCKS = StandardRAG(reuse="blocks")


@pytest.fixture
def llm(caching_llm: LanguageModel) -> LanguageModel:
    """It has read nothing yet."""
    caching_llm.prefixes.clear()
    return caching_llm


@pytest.fixture
def kb(tmp_path: Path) -> Path:
    """Four documents of a passage each."""
    (tmp_path / "docs").mkdir()
    for number, line in enumerate(SUMMARIES.read_text(encoding="utf-8").splitlines()[:4]):
        (tmp_path / "docs" / f"{number}.md").write_text(str(json.loads(line)["text"])[:400], encoding="utf-8")
    build([tmp_path / "docs"], tmp_path / "kb", encoder=encoder())
    return tmp_path / "kb"


def read(llm: LanguageModel, kb: Path, limit_bytes: int = 2**30) -> ReadReport:
    with KnowledgeBase.open(kb, encoder=encoder()) as base:
        return read_passages(llm, base, limit_bytes, lambda _: None)


def ask(llm: LanguageModel, kb: Path, method: StandardRAG = BLOCKS, **call: Any) -> Result:
    with KnowledgeBase.open(kb, encoder=encoder()) as base:
        return llm.generate(QUESTION, method=method, kb=base, k=4, abstain=False, max_tokens=6, **call)


def files(kb: Path) -> list[Path]:
    return sorted((kb / READ).glob("*/*.safetensors"))


def test_what_was_read_is_not_read_again(llm: LanguageModel, kb: Path) -> None:
    before = ask(llm, kb)
    assert before.usage.cached_tokens == 0
    report = read(llm, kb)
    assert (report.passages, report.read, report.left_out) == (4, 4, 0)
    assert report.bytes == sum(path.stat().st_size for path in files(kb))
    assert all(path.stat().st_mode & 0o077 == 0 for path in files(kb))
    llm.prefixes.clear()
    found = ask(llm, kb)
    assert found.usage.cached_tokens == found.usage.pasted > 0.5 * found.usage.prompt_tokens
    assert found.usage.exact is False
    # 8 bits move a number by 1/254 of its row's largest at most.
    assert found.tokens[0].token == before.tokens[0].token
    again = read(llm, kb)
    assert (again.passages, again.read, again.bytes) == (4, 0, report.bytes)


def test_the_numbers_are_those_of_reading_but_for_their_eight_bits(llm: LanguageModel, kb: Path) -> None:
    read(llm, kb)
    with KnowledgeBase.open(kb, encoder=encoder()) as base:
        passage = base.passage(int(base.ids[0]))
    tokens = alone(template_head(llm), passage_tokens(llm, passage))
    found = block_files.BlockFiles(kb, llm.loaded).find(passage, tokens)
    assert found is not None
    assert found.pasted == len(tokens)  # so that it is never taken for what reading gives
    exact = specrag.engine.Session(llm.loaded.model)
    llm.executor.run(llm.executor.submit(exact.extend(tokens)))
    assert files(kb)[0].parent.joinpath(f"{passage.id}.safetensors").stat().st_size < 0.6 * exact.cache.nbytes
    for layer in range(exact.cache.shape.layers):
        mine, own = (each.cache.rows(layer, 0, len(tokens) - 1).float() for each in (found, exact))
        largest = own.abs().amax(dim=-1, keepdim=True)
        assert ((mine - own).abs() <= largest * (1 / 254 + 2**-7)).all()


def test_exact_answers_find_nothing_of_it(llm: LanguageModel, kb: Path) -> None:
    expected = ask(llm, kb, StandardRAG(), log_probs=1)
    read(llm, kb)
    llm.prefixes.clear()
    ask(llm, kb)
    found = ask(llm, kb, StandardRAG(), log_probs=1)
    assert found.tokens == expected.tokens
    assert found.usage.exact
    assert found.usage.cached_tokens < 60  # the template in front of all prompts


def test_a_flipped_byte_is_read_anew(llm: LanguageModel, kb: Path) -> None:
    read(llm, kb)
    whole = ask(llm, kb).usage
    llm.prefixes.clear()
    damaged = files(kb)[1]
    content = bytearray(damaged.read_bytes())
    content[-1000] ^= 1
    damaged.write_bytes(content)
    found = ask(llm, kb).usage
    assert 0 < found.cached_tokens < whole.cached_tokens
    assert found.pasted == whole.pasted
    assert read(llm, kb).read == 1  # and written anew


def test_another_version_of_the_model_finds_nothing(
    llm: LanguageModel, kb: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read(llm, kb)
    other = block_files._identities[llm.loaded.model] | {"weights": "0" * 64}
    monkeypatch.setitem(block_files._identities, llm.loaded.model, other)
    assert ask(llm, kb).usage.cached_tokens == 0
    llm.prefixes.clear()
    (mine,) = (kb / READ).iterdir()
    mine.rename(block_files.BlockFiles(kb, llm.loaded).folder)  # the same name by chance
    assert ask(llm, kb).usage.cached_tokens == 0


def test_there_is_room_for_so_much(llm: LanguageModel, kb: Path) -> None:
    report = read(llm, kb, 1)
    assert (report.passages, report.left_out) == (1, 3)
    found = ask(llm, kb).usage
    assert 0 < found.cached_tokens < found.pasted
    assert read(llm, kb).read == 3


def test_a_full_disk_is_told_and_loses_nothing(
    llm: LanguageModel, kb: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read(llm, kb, 1)
    (kept,) = files(kb)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("specrag.engine.prefix_file.save_file", full)
    with pytest.raises(PrefixFileError, match=r"cannot be written .*choose a folder with room"):
        read(llm, kb)
    monkeypatch.undo()
    assert files(kb) == [kept]
    assert ask(llm, kb).usage.cached_tokens > 0


def test_what_was_read_goes_with_its_passage(llm: LanguageModel, kb: Path, tmp_path: Path) -> None:
    read(llm, kb)
    remove(["1.md"], kb)
    assert len(files(kb)) == 3
    (tmp_path / "docs" / "1.md").unlink()
    (tmp_path / "docs" / "2.md").write_text("Nothing of what was here is here any more.", encoding="utf-8")
    build([tmp_path / "docs"], kb, encoder=encoder())
    with KnowledgeBase.open(kb, encoder=encoder()) as base:
        there = {str(passage) for passage in base.ids}
    assert {path.stem for path in files(kb)} < there
    assert len(files(kb)) == 2


def test_the_command_reads_when_it_indexes(model_home: Path, kb: Path, tmp_path: Path) -> None:
    docs = str(tmp_path / "docs")
    done = command("index", docs, "--kb", str(kb), "--read", "--read-gb", "0.002")
    assert done.code == 0, done.err
    assert "passages kept" in done.out
    assert "note: no room for" in done.err
    more = command("index", docs, "--kb", str(kb), "--read", "--json")
    assert json.loads(more.out)["read"]["passages"] == 4
    for words, named in (
        (["--read-gb", "1"], "--read-gb: 1.0 is not usable: add --read"),
        (["--read", "--read-gb", "0"], "--read-gb: 0.0 is not usable: give a number of at least 0.001"),
        (["--read", "--watch"], "--watch: True is not usable: leave it out with --read"),
        (["--read", "--window", "5"], "--window: 5 is not usable: leave it out with --read"),
        (
            ["--model", "smollm2-135m"],
            "--model: 'smollm2-135m' is not usable: it is for datastores; add --knn-lm",
        ),
    ):
        wrong = command("index", docs, "--kb", str(kb), *words)
        assert wrong.code == 1, words
        assert named in wrong.err
