"""The static corpus finds what a search through all texts finds, comes whole from disk, and says what is wrong."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrag.errors import InputError
from specrag.speculation.suffix.automaton import SuffixAutomaton
from specrag.speculation.suffix.corpus import SuffixCorpus, build_corpus
from specrag.speculation.suffix.index import LARGEST_TOKEN, Match, SuffixIndex, Tokens
from tests.power_loss import attempt, check_power_loss, each_failure

TOKENIZER = "tokenizer-1"

texts = st.lists(st.lists(st.integers(0, 2), max_size=15), max_size=6)
several = texts.filter(lambda found: any(len(text) > 1 for text in found))


def opened(found: Iterable[Tokens], folder: Path) -> SuffixCorpus:
    build_corpus(found, folder, tokenizer=TOKENIZER)
    return SuffixCorpus.open(folder, tokenizer=TOKENIZER)


def ends_of(found: Sequence[Sequence[int]], suffix: Sequence[int]) -> list[int]:
    """Where ``suffix`` ends with a token of its text behind it, by looking everywhere."""
    ends = []
    start = 1
    for text in found:
        ends += [
            start + end
            for end in range(len(suffix), len(text))
            if list(text[end - len(suffix) : end]) == list(suffix)
        ]
        start += len(text) + 1
    return ends


def longest(found: Sequence[Sequence[int]], tail: Sequence[int], max_length: int) -> list[int]:
    """The longest suffix of ``tail`` that :func:`ends_of` finds."""
    for length in range(min(len(tail), max_length), 0, -1):
        suffix = list(tail[len(tail) - length :])
        if min(suffix) >= 0 and ends_of(found, suffix):
            return suffix
    return []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "corpus"


@pytest.fixture
def small(folder: Path) -> Iterator[SuffixCorpus]:
    with opened([[5, 6, 7], [], [6, 7, 8, 9], [8]], folder) as corpus:
        yield corpus


@settings(deadline=None, max_examples=100)
@given(several, st.lists(st.lists(st.integers(-1, 3), max_size=10), max_size=6), st.integers(0, 10))
def test_matches_are_found_as_by_looking_everywhere(
    found: list[list[int]], tails: list[list[int]], max_length: int
) -> None:
    with tempfile.TemporaryDirectory() as parent, opened(found, Path(parent) / "corpus") as corpus:
        assert len(corpus) == sum(map(len, found)) + len(found) + 1
        for tail in [*tails, *found]:
            match = corpus.match(tail, max_length)
            suffix = longest(found, tail, max_length)
            ends = ends_of(found, suffix) if suffix else []
            assert (match.length, match.count) == (len(suffix), len(ends))
            assert sorted(corpus.occurrences(match, 10**9).tolist()) == ends
            for limit in range(len(ends)):
                some = corpus.occurrences(match, limit).tolist()
                assert len(set(some)) == limit
                assert set(some) <= set(ends)
                assert corpus.occurrences(match, limit).tolist() == some


@settings(deadline=None, max_examples=50)
@given(several, st.lists(st.integers(0, 3), max_size=10), st.integers(0, 10))
def test_both_indexes_propose_the_same(found: list[list[int]], tail: list[int], max_length: int) -> None:
    automaton = SuffixAutomaton()
    for text in found:
        automaton.extend(text)
        automaton.end_text()

    def proposals(index: SuffixIndex) -> list[list[int]]:
        match = index.match(tail, max_length)
        return sorted(index.continuation(int(end), 4).tolist() for end in index.occurrences(match, 10**9))

    with tempfile.TemporaryDirectory() as parent, opened(found, Path(parent) / "corpus") as corpus:
        assert proposals(corpus) == proposals(automaton)
        assert all(proposals(corpus))


@pytest.mark.parametrize("different", [3, 255, 256, 65_535, 65_536, 151_936])
def test_any_vocabulary_is_sorted(different: int, folder: Path) -> None:
    """One, two and three bytes a token inside, on both sides of each border, and gaps between the ids."""
    draw = np.random.default_rng(0)
    text = np.concatenate([draw.permutation(different), draw.integers(0, different, 2000)]) * 5 + 2
    with opened([text, text[::-1]], folder) as corpus:
        for end in [3, len(text) // 2, len(text) - 1]:
            match = corpus.match(text[:end].tolist())
            assert match.length == min(end, 64)
            assert end + 1 in corpus.occurrences(match, 10**9)
        # Every position that has a token behind it, each once, in the order of what stands before it.
        tokens, positions = corpus._arrays.tokens, corpus._arrays.positions
        assert sorted(positions.tolist()) == np.flatnonzero((tokens[:-1] >= 0) & (tokens[1:] >= 0)).tolist()
        assert (np.diff(tokens[positions]) >= 0).all()


def test_the_largest_token_fits(folder: Path) -> None:
    with opened([[LARGEST_TOKEN, 0, LARGEST_TOKEN, 7]], folder) as corpus:
        assert corpus.continuation(
            int(corpus.occurrences(corpus.match([0, LARGEST_TOKEN]), 1)[0]), 3
        ).tolist() == [7]


def test_positions_lead_back_to_texts(small: SuffixCorpus) -> None:
    ends = small.occurrences(small.match([6, 7]), 5)
    assert [small.continuation(int(end), 5).tolist() for end in ends] == [[8, 9]]  # not beyond the first text
    assert [small.text(int(end)) for end in ends] == [2]
    assert [small.text(end) for end in (1, 3, 6, 9, 11)] == [0, 0, 2, 2, 3]
    assert small.continuation(1, 2).tolist() == [5, 6]
    assert small.match([8]).count == 1  # the text that is only "8" continues nothing
    assert (small.manifest.texts, small.manifest.tokens) == (4, 8)
    assert small.nbytes == 4 * len(small) + 4 * 5 + 8 * 4


def test_more_occurrences_than_asked_for_are_sampled_evenly(folder: Path) -> None:
    """A quarter of the continuations of 5 is 1, the rest 2: so they are in the sample."""
    draw = random.Random(0)
    found = [[left, 5, draw.choice([1, 2, 2, 2])] for left in range(100, 500)]
    with opened(found, folder) as corpus:
        match = corpus.match([5])
        assert match.count == 400
        ends = corpus.occurrences(match, 40)
        assert len(set(ends.tolist())) == 40
        guesses = [int(corpus.continuation(int(end), 1)[0]) for end in ends]
        assert guesses.count(1) in range(5, 16)
        lefts = [corpus.text(int(end)) for end in ends]
        assert lefts == sorted(lefts)  # texts were given in the order of what stands before the 5


def test_a_corpus_is_replaced_whole(folder: Path) -> None:
    older = opened([[1, 2, 3]], folder)
    newer = opened(iter([np.array([4, 5, 6], dtype=np.uint16)]), folder)
    assert older.match([1, 2]).length == 2
    assert newer.match([1, 2]).length == 0
    assert newer.match([4, 5]).length == 2
    assert sorted(path.name for path in folder.parent.iterdir()) == ["corpus"]


def test_a_failed_build_leaves_the_older_corpus(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened([[1, 2, 3]], folder).close()

    def texts_that_end_badly() -> Iterator[list[int]]:
        yield [4, 5]
        raise KeyError("the source broke")

    with pytest.raises(KeyError):
        build_corpus(texts_that_end_badly(), folder, tokenizer=TOKENIZER)

    def no_space(file: object, array: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(np, "save", no_space)
        with pytest.raises(InputError, match="No space left on device"):
            build_corpus([[4, 5]], folder, tokenizer=TOKENIZER)
    assert [path.name for path in folder.parent.iterdir()] == ["corpus"]
    with SuffixCorpus.open(folder, tokenizer=TOKENIZER) as corpus:
        assert corpus.match([1, 2]).length == 2


@pytest.mark.parametrize(
    ("found", "field"),
    [
        ([], "texts"),
        ([[]], "texts"),
        ([[1], [2]], "texts"),
        ([[1, 2], [3, -4]], "texts[1]"),
        ([[1, LARGEST_TOKEN + 1]], "texts[0]"),
        ([[0.5, 1.5]], "texts[0]"),
    ],
)
def test_bad_texts_are_refused(found: list[list[int]], field: str, folder: Path) -> None:
    with pytest.raises(InputError) as caught:
        build_corpus(found, folder, tokenizer=TOKENIZER)
    assert caught.value.field == field
    assert not folder.exists()


def test_other_files_are_not_overwritten(folder: Path) -> None:
    folder.mkdir()
    (folder / "letter.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(InputError, match="holds other files"):
        build_corpus([[1, 2]], folder, tokenizer=TOKENIZER)
    assert [path.name for path in folder.iterdir()] == ["letter.txt"]


def test_an_empty_folder_is_filled(folder: Path) -> None:
    folder.mkdir()
    assert opened([[1, 2]], folder).match([1]).length == 1


def test_a_tokenizer_must_be_named(folder: Path) -> None:
    with pytest.raises(InputError, match="fingerprint"):
        build_corpus([[1, 2]], folder, tokenizer="")


def test_another_tokenizer_is_refused(small: SuffixCorpus) -> None:
    with pytest.raises(InputError) as caught:
        SuffixCorpus.open(small.folder, tokenizer="tokenizer-2")
    assert caught.value.field == "corpus"
    assert caught.value.value == str(small.folder)
    assert "'tokenizer-1', not 'tokenizer-2': build one" in caught.value.remedy
    assert "\n" not in str(caught.value)


def _edit(**changes: object) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / "manifest.json"
        content = json.loads(path.read_text(encoding="utf-8"))
        content.update(changes)
        path.write_text(json.dumps(content), encoding="utf-8")

    return apply


def _flip(name: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        data[-1] ^= 1
        (folder / name).write_bytes(data)

    return apply


def _cut(name: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        (folder / name).write_bytes((folder / name).read_bytes()[:-4])

    return apply


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, "there is no corpus"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "there is no corpus"),
    "no tokens": (lambda folder: (folder / "tokens.npy").unlink(), "tokens.npy is missing"),
    "no order": (lambda folder: (folder / "suffix_array.npy").unlink(), "suffix_array.npy is missing"),
    "no texts": (lambda folder: (folder / "texts.npy").unlink(), "texts.npy is missing"),
    "a token": (_flip("tokens.npy"), "tokens.npy has another checksum"),
    "a place": (_flip("suffix_array.npy"), "suffix_array.npy has another checksum"),
    "an end": (_cut("texts.npy"), "texts.npy has another checksum"),
    "half a manifest": (_cut("manifest.json"), "manifest.json cannot be read"),
    "a list": (lambda folder: (folder / "manifest.json").write_text("[1]"), "manifest.json cannot be read"),
    "no text": (
        lambda folder: (folder / "manifest.json").write_bytes(b"\xff\xfe"),
        "manifest.json cannot be read",
    ),
    "unknown field": (_edit(colour="red"), "manifest.json cannot be read"),
    "later format": (_edit(format="specrag suffix corpus 9"), "its format is 'specrag suffix corpus 9'"),
    "number of texts": (_edit(texts="many"), "manifest.json is damaged"),
    "file names": (_edit(checksums={"../secret": "0"}), "manifest.json is damaged"),
    "names only": (
        _edit(checksums=["tokens.npy", "texts.npy", "suffix_array.npy"]),
        "manifest.json is damaged",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_noticed_when_it_is_opened(name: str, folder: Path) -> None:
    opened([[1, 2, 3]], folder).close()
    damage, message = DAMAGE[name]
    damage(folder)
    with pytest.raises(InputError, match=message) as caught:
        SuffixCorpus.open(folder, tokenizer=TOKENIZER)
    assert caught.value.field == "corpus"
    assert "build" in caught.value.remedy
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("max_length", lambda corpus: corpus.match([1], -1)),
        ("limit", lambda corpus: corpus.occurrences(Match(1, 0, 1), -1)),
        ("match", lambda corpus: corpus.occurrences(Match(1, 0), 1)),
        ("match", lambda corpus: corpus.occurrences(Match(1, 5, 1), 1)),
        ("end", lambda corpus: corpus.continuation(-1, 1)),
        ("count", lambda corpus: corpus.continuation(1, -1)),
    ],
)
def test_bad_questions_are_refused(
    field: str, call: Callable[[SuffixCorpus], object], small: SuffixCorpus
) -> None:
    with pytest.raises(InputError) as caught:
        call(small)
    assert caught.value.field == field


def test_a_closed_corpus_says_so(small: SuffixCorpus) -> None:
    match = small.match([6])
    small.close()
    small.close()
    for call in (lambda: small.match([6]), lambda: small.occurrences(match, 1), lambda: len(small)):
        with pytest.raises(InputError, match="open it again"):
            call()


def test_a_million_tokens(tmp_path: Path) -> None:
    """Built in seconds, looked up in microseconds, by several threads at once."""
    draw = np.random.default_rng(0)
    tokens = np.minimum(draw.zipf(1.3, 1_000_000), 49_151)
    for start in range(0, 900_000, 300):  # two thirds of it said before
        source = int(draw.integers(0, start + 1))
        tokens[start + 100 : start + 300] = tokens[source : source + 200]
    before = time.perf_counter()
    build_corpus(np.split(tokens, range(250, len(tokens), 250)), tmp_path / "corpus", tokenizer=TOKENIZER)
    assert time.perf_counter() - before < 12  # the pace of 10 million in two minutes
    with SuffixCorpus.open(tmp_path / "corpus", tokenizer=TOKENIZER) as corpus:
        tails = [tokens[end - 64 : end].tolist() for end in draw.integers(64, len(tokens), 1000)]

        def propose(tail: list[int]) -> list[int]:
            match = corpus.match(tail)
            return [match.length, *corpus.occurrences(match, 8).tolist()]

        expected = [propose(tail) for tail in tails]
        # Each tail stands in the corpus; what was cut is at most the part before its own text.
        for tail, (length, *ends) in zip(tails, expected, strict=True):
            for end in ends:
                assert corpus._arrays.tokens[end - length : end].tolist() == tail[64 - length :]
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(propose, tails)) == expected
        seconds = []
        for tail in [*tails[:100], [int(np.bincount(tokens).argmax())]]:
            begin = time.perf_counter()
            propose(tail)
            seconds.append(time.perf_counter() - begin)
        assert np.median(seconds) < 100e-6


def test_a_power_loss_leaves_a_whole_corpus_or_none(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    old, new = [[1, 2, 3, 1, 2]], [[4, 5, 6], [4, 5, 7]]

    def build(found: list[list[int]]) -> None:
        build_corpus(found, disk / "corpus", tokenizer="t")

    def seen(root: Path) -> int | None:
        if not (root / "corpus").exists():
            return None
        with SuffixCorpus.open(root / "corpus", tokenizer="t") as corpus:
            return len(corpus)

    build(new)
    after = seen(disk)
    build(old)
    before = seen(disk)
    assert before != after
    check_power_loss(disk, lambda: build(new), seen, before=[before, None], after=after)
    for failing in each_failure(disk):
        build(old)
        refused = attempt(failing, lambda: build(new))
        assert not refused or "cannot be written" in refused
        back = [None] if failing.lasting else []  # the old one cannot be put back where no rename works
        assert seen(disk) in ([before, after, *back] if refused else [after])
