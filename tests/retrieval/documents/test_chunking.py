"""Chunks: nothing lost, nothing too long, cut where a reader would cut, and named where they stand."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from specrag.errors import InputError
from specrag.models import catalog
from specrag.retrieval.documents.chunking import Chunk, Chunker
from specrag.retrieval.documents.converters import Markup, Part
from specrag.retrieval.documents.files import find_files
from specrag.retrieval.documents.reader import Document, read_file

SETTINGS = ((16, 0), (16, 8), (40, 10), (100, 30))
SENTENCE = "The red pump number {} lifts water from the well to the tank on the hill."


@pytest.fixture(scope="session")
def minilm_tokenizer(model_home: Path) -> Path:
    return catalog.resolve("minilm-l6-v2").folder / "tokenizer.json"


@pytest.fixture(scope="session", params=["minilm-l6-v2", "smollm2-135m"])
def tokenizer_file(request: pytest.FixtureRequest, model_home: Path) -> Path:
    """WordPiece, whose counts add up over words, and byte-level BPE, whose counts do not."""
    return catalog.resolve(request.param).folder / "tokenizer.json"


@pytest.fixture(scope="session")
def chunkers(tokenizer_file: Path) -> list[Chunker]:
    return [Chunker(tokenizer_file, max_tokens, overlap) for max_tokens, overlap in SETTINGS]


@pytest.fixture(scope="session")
def chunker(minilm_tokenizer: Path) -> Chunker:
    return Chunker(minilm_tokenizer, max_tokens=64, overlap=16)


def document(text: str, markup: Markup = "plain", *, place: str = "", own_lines: bool = True) -> Document:
    return Document("a", "Manual", (Part(text, place, markup, own_lines),))


def prose(sentences: int, joint: str = " ") -> str:
    return joint.join(SENTENCE.format(number) for number in range(sentences))


def assert_nothing_lost(text: str, chunks: list[Chunk]) -> None:
    """Chunks that follow each other in the text, with only space between them, can be laid over all of it."""
    reached = {0}  # every index up to which the chunks so far may cover the text; a text may repeat itself
    for chunk in chunks:
        size, ends = len(chunk.text), set()
        for covered in reached:
            last = len(text) - len(text[covered:].lstrip())
            start = text.find(chunk.text, max(0, covered - size + 1), last + size)
            while start >= 0:
                ends.add(start + size)
                start = text.find(chunk.text, start + 1, last + size)
        reached = ends
        assert reached
    assert any(not text[covered:].strip() for covered in reached)


words = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
pieces = st.one_of(
    words,
    st.sampled_from(
        [
            "\n",
            "\n\n",
            ". ",
            " ",
            "# A\n",
            "\n## B b\n",
            "```\n",
            "- x\n",
            "| a | b |\n",
            "---\n",
            "> ",
            "。",
            "漢字" * 30,
            "x" * 300,
        ]
    ),
    st.integers(0, 99).map(lambda number: SENTENCE.format(number) + " "),
)
texts = st.lists(pieces, max_size=60).map("".join)


@settings(max_examples=150, deadline=None)
@given(text=texts, markup=st.sampled_from(["plain", "markdown"]), which=st.integers(0, len(SETTINGS) - 1))
def test_nothing_lost_nothing_too_long(
    chunkers: list[Chunker], text: str, markup: Markup, which: int
) -> None:
    chunker = chunkers[which]
    chunks = chunker.chunk(document(text, markup))
    for chunk in chunks:
        assert chunk.text == chunk.text.strip() != ""
        assert chunker.count(chunk.text) <= chunker.max_tokens
    assert_nothing_lost(text, chunks)
    assert chunks == chunker.chunk(document(text, markup))


def test_a_new_chunker_cuts_at_the_same_places(tokenizer_file: Path) -> None:
    for markup in ("plain", "markdown"):
        first, second = (Chunker(tokenizer_file, 50, 10).chunk(document(MARKDOWN, markup)) for _ in range(2))
        assert first == second


@pytest.mark.parametrize("joint", [" ", "\n", "\n\n"])
def test_chunks_of_a_long_text_overlap(chunker: Chunker, joint: str) -> None:
    text = prose(200, joint)
    chunks = chunker.chunk(document(text))
    assert len(chunks) > 40
    assert_nothing_lost(text, chunks)
    starts = [text.index(chunk.text) for chunk in chunks]
    for start, following, chunk in zip(starts, starts[1:], chunks, strict=False):
        repeated = text[following : start + len(chunk.text)]
        assert repeated
        assert chunker.count(repeated) <= chunker.overlap


@pytest.mark.parametrize("ending", ["", " ", "\n\n \n", "\n***\n"])
def test_no_chunk_only_repeats_its_neighbour(tokenizer_file: Path, ending: str) -> None:
    text = "00\x80Ä" + SENTENCE + ending
    chunks = Chunker(tokenizer_file, 16, 8).chunk(document(text))
    assert len(chunks) > 1
    for first, second in pairwise(chunks):
        assert first.text not in second.text
        assert second.text not in first.text


def test_cuts_fall_between_sentences(minilm_tokenizer: Path) -> None:
    chunker = Chunker(minilm_tokenizer, max_tokens=100, overlap=40)
    for text in (prose(100), prose(100).replace(" to the tank", "\nto the tank")):  # the second is wrapped
        for chunk in chunker.chunk(document(text)):
            assert chunk.text.startswith("The red pump")
            assert chunk.text.endswith("on the hill.")


def test_wrapped_code_keeps_its_lines(minilm_tokenizer: Path) -> None:
    code = "\n".join(f"first_{number} = second_{number} + third_{number}" for number in range(60))
    chunker = Chunker(minilm_tokenizer, 64, 0)
    for chunks in (chunker.chunk(document(code)), chunker.chunk(document(f"```\n{code}\n```\n", "markdown"))):
        assert len(chunks) > 10
        assert all(chunk.text.removeprefix("```\n").startswith("first_") for chunk in chunks)


def test_text_without_any_border(tokenizer_file: Path) -> None:
    chunker = Chunker(tokenizer_file, 32, 8)
    for text in ("a" * 50_000, "漢" * 5_000, "\U0001f600" * 3_000, "0" * 20_000):
        chunks = chunker.chunk(document(text))
        assert "".join(text.split()).startswith(chunks[0].text)
        assert all(chunker.count(chunk.text) <= 32 and len(chunk.text) <= 32 * 32 for chunk in chunks)
        assert sum(len(chunk.text) for chunk in chunks) >= len(text)


MARKDOWN = f"""Before any heading.

# Manual

## Install

### Linux

{prose(8)}

```
# no heading
```

### Other *systems*

{prose(3)}

Use
---

{prose(8)}
"""


def test_place_is_the_heading_path(chunker: Chunker) -> None:
    chunks = chunker.chunk(document(MARKDOWN, "markdown"))
    assert_nothing_lost(MARKDOWN, chunks)
    places = [chunk.place for chunk in chunks]
    assert places[0] == "line 1"
    assert list(dict.fromkeys(places[1:])) == ["Install > Linux", "Install > Other systems", "Use"]
    assert {chunk.title for chunk in chunks} == {"Manual"}
    # A chunk repeats nothing from under another heading.
    first_of_use = next(chunk for chunk in chunks if chunk.place == "Use")
    assert first_of_use.text.startswith("Use\n---")
    assert all(SENTENCE[:12] in chunk.text for chunk in chunks[1:])  # no heading stands alone


def test_place_is_the_lines_of_the_file(chunker: Chunker) -> None:
    text = "\n\n" + prose(40, "\n") + "\n"
    lines = text.split("\n")
    chunks = chunker.chunk(document(text))
    assert chunks[0].place.startswith("lines 3-")
    assert chunks[-1].place.endswith("-42")
    for chunk in chunks:
        first, last = map(int, chunk.place.removeprefix("lines ").split("-"))
        assert chunk.text in "\n".join(lines[first - 1 : last])
        assert chunk.text.split("\n")[0] in lines[first - 1]
        assert chunk.text.split("\n")[-1] in lines[last - 1]


@pytest.mark.parametrize("place", ["page 3", "line 17"])
def test_place_of_the_part_stays(chunker: Chunker, place: str) -> None:
    for text in ("Short.", prose(40)):
        chunks = chunker.chunk(document(text, place=place, own_lines=False))
        assert {chunk.place for chunk in chunks} == {place}


def test_a_table_is_cut_between_rows(chunker: Chunker) -> None:
    row = "item: pump number {}; colour: {}red; seen: yesterday by the warden"
    rows = [row.format(number, "rather " * (number % 5)) for number in range(30)]
    part = Part("\n".join(rows), "sheet Costs", "rows", own_lines=True, first=5)
    chunks = chunker.chunk(Document("a", "Manual", (part,)))
    assert [row for chunk in chunks for row in chunk.text.split("\n")] == rows  # none in two, none twice
    assert 5 < len(chunks) < 30
    number = 5
    for chunk in chunks:
        last = number + chunk.text.count("\n")
        rows_named = f"rows {number}-{last}" if last > number else f"row {number}"
        assert chunk.place == f"sheet Costs, {rows_named}"
        number = last + 1


def test_headings_and_lines_stand_behind_the_place_of_the_part(chunker: Chunker) -> None:
    chunks = chunker.chunk(
        document("# Manual\n\n## Use\n\nTurn it.", "markdown", place="slide 3", own_lines=False)
    )
    assert [chunk.place for chunk in chunks] == ["slide 3 > Use"]
    chunks = chunker.chunk(document("One.\nTwo.", place="attachment a.txt"))
    assert [chunk.place for chunk in chunks] == ["attachment a.txt, lines 1-2"]


def test_converted_text_without_headings_has_no_place(chunker: Chunker) -> None:
    assert {chunk.place for chunk in chunker.chunk(document(prose(40), "markdown", own_lines=False))} == {""}


def test_parts_are_never_joined(chunker: Chunker) -> None:
    parts = (Part("One.", "page 1"), Part(" \n", "page 2"), Part("Three.", "page 3"))
    chunks = chunker.chunk(Document("a", "Manual", parts))
    assert chunks == [Chunk("One.", "Manual", "page 1"), Chunk("Three.", "Manual", "page 3")]


def test_a_tokenizer_that_truncates_and_pads_counts_all(minilm_tokenizer: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(minilm_tokenizer))
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    chunker = Chunker(tmp_path / "tokenizer.json")
    assert chunker.count("one two three four five six seven eight nine ten") == 10
    assert chunker.count("one") == 1


@pytest.mark.parametrize(
    ("max_tokens", "overlap"), [(15, 0), (0, 0), (-1, 0), (16, 9), (200, -1), (200, 200)]
)
def test_settings_are_checked(minilm_tokenizer: Path, max_tokens: int, overlap: int) -> None:
    with pytest.raises(InputError, match="give"):
        Chunker(minilm_tokenizer, max_tokens, overlap)


def test_tokenizer_file_is_checked(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        Chunker(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InputError, match=r"no tokenizer\.json"):
        Chunker(tmp_path / "tokenizer.json").chunk(document("text"))


def test_a_megabyte_in_time(minilm_tokenizer: Path) -> None:
    text = prose(13_000)
    started = time.perf_counter()
    chunks = Chunker(minilm_tokenizer).chunk(document(text))
    assert time.perf_counter() - started < 40  # 2 s on a quiet machine
    assert len(chunks) > 1_000


def test_real_passages(measuring_data: Path, minilm_tokenizer: Path) -> None:
    found = find_files([measuring_data / "corpus_wiki_passages.jsonl.gz"])
    read = read_file(found.files[0])
    assert len(read.documents) == 68_980
    assert not read.skipped
    chunker = Chunker(minilm_tokenizer)
    some = read.documents[::100]
    started = time.perf_counter()
    chunks = [chunker.chunk(document) for document in some]
    assert time.perf_counter() - started < 6  # a minute would be 0.6 s of it
    assert all(found[0].place.startswith("line ") for found in chunks)
