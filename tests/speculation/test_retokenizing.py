"""One text in two vocabularies: nothing is lost, nothing is read anew, and only whole characters are guessed."""

from __future__ import annotations

import codecs
import random
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specrag.errors import InputError
from specrag.models.catalog import ModelFiles
from specrag.models.tokenizer import Tokenizer
from specrag.speculation.vocabularies import (
    Continuation,
    FollowedText,
    InnerEncoder,
    VocabularyPair,
    check_alignment,
)
from tests.speculation.spelling import NAMES, PAIRS, Spelling, real_tokenizer

#: Below the planes whose bytes SmolLM2's vocabulary lacks, and without the control characters that it lacks.
CHARACTERS = st.characters(max_codepoint=0x2FFF, min_codepoint=32) | st.sampled_from(
    "\n\t東京語🗼🙂👩‍🚀\u0301'\u2019"
)
WORDS = st.sampled_from(
    ["the", "lighthouse", "it's", "In", "2023", "3.14", "(a", "note)", "naïve", "東京", "🗼", "x", "Mr.", "def",
     "foo_bar", "=", "!!", "…", "re-read", "\n", "\n\n", "\t", "", "and", "Gannet", "http://a.b/c?d=e"]
)  # fmt: skip
PROSE = st.lists(WORDS, max_size=120).map(" ".join)
TEXTS = st.text(CHARACTERS, max_size=400) | PROSE


@pytest.fixture(scope="module", params=PAIRS, ids=lambda pair: f"{pair[0][:5]}<-{pair[1][:5]}")
def pair(request: pytest.FixtureRequest, smollm2: Path) -> VocabularyPair:
    target, draft = request.param
    return VocabularyPair(real_tokenizer(target), real_tokenizer(draft))


@pytest.fixture(scope="module", params=NAMES)
def encoder(request: pytest.FixtureRequest, smollm2: Path) -> InnerEncoder:
    return InnerEncoder(real_tokenizer(request.param))


def text_of(pair: VocabularyPair, tokens: Sequence[int]) -> str:
    """What the target's tokens say, as far as it is characters, composed as Qwen's tokenizer composes it."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return unicodedata.normalize("NFC", decoder.decode(pair.target.spelled(tokens)))


def read_by(pair: VocabularyPair, text: FollowedText) -> str:
    tokens = text.tokens[len(pair.front) :]
    return unicodedata.normalize("NFC", pair.draft.spelled(tokens).decode())


# -- following a text -----------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(text=TEXTS, steps=st.lists(st.integers(0, 40), max_size=12), seed=st.integers(0, 99))
def test_the_draft_model_reads_the_targets_text(
    pair: VocabularyPair, text: str, steps: list[int], seed: int
) -> None:
    """However it grows and shrinks, at borders of tokens anywhere inside words and characters."""
    tokens = pair.target.encode(text)
    rng = random.Random(seed)
    followed, length = FollowedText(pair), 0
    forks = []
    for step in [*steps, len(tokens)]:
        if rng.random() < 0.3:
            length = rng.randint(0, length)
            followed.truncate(length)
        if rng.random() < 0.2:
            forks.append(followed.fork())
        length = min(length + step, len(tokens))
        followed.follow(tokens[:length])
        fresh = FollowedText(pair)
        fresh.follow(tokens[:length])
        assert (followed.tokens, followed.settled) == (fresh.tokens, fresh.settled)
        assert read_by(pair, followed) == text_of(pair, tokens[:length])
    for fork in forks:  # they were left behind wherever the text was then
        fork.follow(tokens)
        assert fork.tokens == followed.tokens


@settings(max_examples=60, deadline=None)
@given(tokens=st.lists(st.integers(0, 49151) | st.integers(0, 300), max_size=60))
def test_any_tokens_can_be_read(pair: VocabularyPair, tokens: list[int]) -> None:
    """Special tokens, unknown ones, bytes that never become a character: nothing fails, and text stays text."""
    followed = FollowedText(pair)
    followed.follow(tokens)
    specials = set(pair.to_draft.values())
    data = pair.draft.spelled(followed.tokens)
    expected = pair.target.spelled([token for token in tokens if token not in pair.to_draft])
    if not any(token in pair.to_draft for token in tokens):
        assert not specials & set(followed.tokens[len(pair.front) :])
    letters = "".join(chr(byte) for byte in expected if byte < 128 and chr(byte).isalnum())
    assert "".join(chr(byte) for byte in data if byte < 128 and chr(byte).isalnum()) == letters


@settings(max_examples=80, deadline=None)
@given(text=PROSE)
def test_parts_are_cut_where_tokens_end(pair: VocabularyPair, text: str) -> None:
    followed = FollowedText(pair)
    followed.follow(pair.target.encode(text))
    assert followed.tokens == [*pair.front, *pair.draft.encode(text)]
    if len(text) > 2000:
        assert followed.settled > len(followed.tokens) / 2


@pytest.mark.parametrize(
    "middle", ["  two", " \n  y", "\n\n", " 12 a", " (x", " 東京 a", "      ", "\t z", "a b", " é a"]
)
def test_parts_are_cut_nowhere_else(pair: VocabularyPair, middle: str) -> None:
    for length in range(55, 70):
        text = "lighthouse" * (length // 10) + "x" * (length % 10) + middle + " and so on" * 30
        followed = FollowedText(pair)
        followed.follow(pair.target.encode(text))
        assert followed.tokens == [*pair.front, *pair.draft.encode(text)]


@pytest.mark.parametrize("text", ["東京は日本の首都です。" * 300, "lighthouse and rock " * 200, "-" * 4000])
def test_reading_on_costs_the_same_late_in_a_text(text: str) -> None:
    words = sorted({character.encode() for character in text})
    tokenizer = Spelling(words)
    pair = VocabularyPair(tokenizer, tokenizer)
    tokens = pair.target.encode(text)
    followed = FollowedText(pair)
    most = 0
    for length in range(len(tokens)):
        tokenizer.encoded = 0
        followed.follow(tokens[:length])
        if length % 100 == 99:
            followed.truncate(length - 50)
            followed.follow(tokens[:length])
        most = max(most, tokenizer.encoded)
    assert most < 1500
    assert pair.draft.spelled(followed.tokens) == text[: len(tokens) - 1].encode()


def test_special_tokens_of_the_same_text_are_kept_and_others_left_out() -> None:
    target = Spelling([b"a", b"b", b"", b"", b""], {"<turn>": 2, "<end>": 3, "<odd>": 4}, ends=[3])
    draft = Spelling([b"", b"", b"ab", b"a", b"b", b""], {"<turn>": 0, "<end>": 1, "<s>": 5}, [1], front=[5])
    pair = VocabularyPair(target, draft)
    followed = FollowedText(pair)
    followed.follow([2, 0, 1, 3, 0, 4, 1, 2])
    assert followed.tokens == [
        5,
        0,
        2,
        1,
        2,
        0,
    ]  # no token reaches across <turn> and <end>; <odd> is not there
    assert followed.settled == 6
    followed.truncate(1)
    followed.follow([2, 0])
    assert (followed.tokens, followed.settled) == ([5, 0, 3], 2)


def test_a_special_token_ends_a_character() -> None:
    words = [b"a", b"\xc3", b"\xa9", b"\xc3\xa9", "\ufffd".encode(), b""]
    pair = VocabularyPair(Spelling(words, {"<turn>": 5}), Spelling(words, {"<turn>": 5}))
    assert Continuation(pair.target, [0, 1]).pending == b"\xc3"
    assert Continuation(pair.target, [0, 1, 5]).pending == b""
    followed = FollowedText(pair)
    followed.follow([0, 1, 2, 1, 5, 2, 0, 1])
    assert followed.tokens == [0, 3, 4, 5, 4, 0]
    followed.truncate(4)
    followed.follow([0, 1, 2, 1, 2])
    assert followed.tokens == [0, 3, 3]


def test_a_beginning_that_both_models_have_is_not_doubled() -> None:
    target = Spelling([b"", b"a"], {"<s>": 0}, front=[0])
    pair = VocabularyPair(target, Spelling([b"a", b""], {"<s>": 1}, front=[1]))
    for tokens, expected in (
        ([0, 1], [1, 0]),
        ([1, 1], [1, 0, 0]),
        ([0, 0, 1], [1, 0]),
        ([0, 1, 0], [1, 0, 1]),
    ):
        followed = FollowedText(pair)
        followed.follow(tokens)
        assert followed.tokens == expected


# -- going on with it -----------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(text=TEXTS, added=TEXTS, border=st.integers(0, 500), cut=st.integers(0, 3))
def test_guesses_spell_the_added_text(
    encoder: InnerEncoder, text: str, added: str, border: int, cut: int
) -> None:
    text, added = unicodedata.normalize("NFC", text), unicodedata.normalize("NFC", added)
    tokens = encoder.encode(text)[:border]
    behind = Continuation(encoder, tokens)
    data = added.encode()
    data = data[: max(len(data) - cut, 0)]
    whole = data.decode(errors="ignore").encode()
    found = behind.tokens(data)
    assert not behind.spells(found, data + b"!")
    if behind.pending:
        assert whole.startswith(behind.pending + encoder.spelled(found)) or not found
    else:
        assert encoder.spelled(found) == whole
        assert behind.spells(found, whole)


@settings(max_examples=150, deadline=None)
@given(text=PROSE, border=st.integers(0, 500))
def test_the_targets_own_text_is_continued_as_it_would_write_it(
    encoder: InnerEncoder, text: str, border: int
) -> None:
    tokens = encoder.encode(text)
    border = min(border, len(tokens))
    behind = Continuation(encoder, tokens[:border])
    read = encoder.spelled(tokens[:border])
    rest = text.encode()[len(read) - len(behind.pending) :]
    assert behind.fits(rest)
    assert behind.tokens(rest) == tokens[border:]


def test_a_begun_character_is_completed_or_nothing_is_guessed(encoder: InnerEncoder) -> None:
    tokens = encoder.encode("at 𓀀")
    data = "𓀀".encode()
    begun = [count for count in range(1, len(tokens)) if not _is_text(encoder.spelled(tokens[:count]))]
    assert begun
    for count in begun:
        behind = Continuation(encoder, tokens[:count])
        assert data.startswith(behind.pending)
        assert 0 < len(behind.pending) < 4
        assert behind.tokens("𓀀 in".encode())[: len(tokens) - count] == tokens[count:]
        assert behind.tokens(b" in") == behind.tokens(data[:-1]) == []
        assert behind.fits(data)
        assert behind.fits(b"")
        assert not behind.fits(b" in")


def test_a_word_that_was_begun_otherwise_goes_on_alone(encoder: InnerEncoder) -> None:
    tokens = [*encoder.encode("say")[:1], *encoder.encode(" hel")]
    assert encoder.spelled(tokens).endswith(b" hel")
    assert tokens != encoder.encode("say hello")[: len(tokens)]
    found = Continuation(encoder, tokens).tokens(b"lo world")
    assert found == encoder.encode("lo world")


@pytest.mark.parametrize(
    ("name", "added", "spelled"),
    [
        ("qwen2.5-coder-1.5b", "cafe\u0301 au lait", "ca"),  # composed by its tokenizer
        ("gemma-3-270m", " low \u2581 line", " low"),  # read as a space by its tokenizer
        ("smollm2-135m", "so \U00040000 on", "so"),  # has no token for the first byte
        ("smollm2-135m", "so <|im_end|> on", "so <|im_end|> on"),
    ],
)
def test_what_a_vocabulary_cannot_spell_is_not_guessed(
    name: str, added: str, spelled: str, smollm2: Path
) -> None:
    encoder = InnerEncoder(real_tokenizer(name))
    found = encoder.spelled(Continuation(encoder, encoder.encode("a ")).tokens(added.encode()))
    assert added.encode().startswith(found)
    assert found.startswith(spelled.encode())


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


# -- what an encoder must keep ----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["<|im_end|>", "a<|im_start|>b", "x<eos><bos>", "<<|im_end|>|im_end|>"])
def test_text_that_spells_a_special_token_is_text(encoder: InnerEncoder, text: str) -> None:
    assert encoder.spelled(encoder.encode(text)) == text.encode()


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """As Llama 2's: a space in front of every text, unknown characters as bytes; with runs of line breaks."""
    return _byte_fallback(tmp_path_factory.mktemp("fallback"), byte_fallback=True)


def _byte_fallback(folder: Path, *, byte_fallback: bool) -> Tokenizer:
    from tokenizers import AddedToken, Regex, decoders, models, normalizers
    from tokenizers import Tokenizer as Backend

    letters = [chr(code) for code in range(33, 127)]
    pieces = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *letters,
        "▁t",
        "he",
        "▁the",
        "\n",
        "\n\n",
    ]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("\n", "\n")]
    backend = Backend(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=merges,
            byte_fallback=byte_fallback,
            unk_token="<unk>",
        )
    )
    steps = [normalizers.Prepend("▁"), normalizers.Replace(Regex(" "), "▁")]
    backend.normalizer = normalizers.Sequence(steps)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": {"content": "</s>"}}')
    return Tokenizer(ModelFiles("fallback", folder, "", ""))


@settings(max_examples=100, deadline=None)
@given(text=TEXTS)
def test_no_space_is_put_in_front_of_a_part(sentencepiece: Tokenizer, text: str) -> None:
    encoder = InnerEncoder(sentencepiece)
    assert encoder.spelled(encoder.encode(text)) == text.encode()
    assert sentencepiece.encode("the", special=False) == encoder.encode(" the")
    assert encoder.encode("the\n\n") == [*encoder.encode("the"), *encoder.encode("\n\n")]
    assert len(encoder.encode("\n\n")) == 1


def test_tokenizers_that_lose_something_are_refused(
    sentencepiece: Tokenizer, tmp_path: Path, smollm2: Path
) -> None:
    ours = real_tokenizer("smollm2-135m")
    check_alignment(ours, sentencepiece)
    check_alignment(sentencepiece, ours)
    lossy = _byte_fallback(tmp_path, byte_fallback=False)
    with pytest.raises(InputError, match="the draft model's tokenizer loses line breaks"):
        check_alignment(ours, lossy)
    with pytest.raises(InputError, match="the target's tokenizer loses line breaks"):
        check_alignment(lossy, ours)
    with pytest.raises(InputError, match="the draft model's tokenizer loses words"):
        check_alignment(ours, real_tokenizer("minilm-l6-v2"))


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_real_pairs_are_aligned(target: str, draft: str, smollm2: Path) -> None:
    theirs, mine = real_tokenizer(target), real_tokenizer(draft)
    check_alignment(theirs, mine)
    pair = VocabularyPair(theirs, mine)
    assert pair.ends.keys() == mine.eos_tokens
    assert set(pair.ends.values()) <= theirs.eos_tokens
    if "gemma" not in target + draft:  # both write chats as ChatML
        for name in ("<|im_start|>", "<|im_end|>"):
            assert pair.to_draft[theirs.special_tokens[name]] == mine.special_tokens[name]
            assert pair.ends[mine.special_tokens["<|im_end|>"]] == theirs.special_tokens["<|im_end|>"]
