"""Text to tokens and back, whole and as a stream."""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from specrag.errors import InputError, ModelFilesError
from specrag.models.chat import END_TOKENS, render_chat, takes_tools
from specrag.models.roles import TextPrompt

if TYPE_CHECKING:
    from specrag.models.catalog import ModelFiles

_LONG = 4000  # characters; tokenising them takes at most 30 ms


@dataclass(frozen=True, slots=True)
class Placed:
    """The tokens of a text and where they start.

    Attributes:
        tokens: token ids.
        starts: index of the character at which each token starts, ascending.
    """

    tokens: Sequence[int]
    starts: Sequence[int]


class Tokenizer:
    """A model's tokenizer: the Rust one of its ``tokenizer.json``, without importing transformers (takes seconds).

    Args:
        files: the model's folder.

    Raises:
        ModelFilesError: the tokenizer's files are missing or damaged.
    """

    def __init__(self, files: ModelFiles) -> None:
        self._files = files
        # tokenizers raises a plain Exception for a damaged file.
        try:
            self._backend: Any = _load_backend(files)
            self._config = _read_json(files, "tokenizer_config.json")
            self._template = _chat_template(files, self._config, "default")
            self._tool_template = _chat_template(files, self._config, "tool_use") or self._template
        except Exception as error:
            reason = " ".join(str(error).split())[:160]
            raise ModelFilesError(
                f"tokenizer of {files.name!r} in {str(files.folder)!r} cannot be loaded ({reason}): "
                "fetch the model again"
            ) from error
        # A tokenizer.json may carry the limits used in training; here a text is never truncated.
        self._backend.no_truncation()
        self._backend.no_padding()

    @property
    def vocab_size(self) -> int:
        """Number of tokens that the tokenizer knows; the model's logits may have a few more columns."""
        size: int = self._backend.get_vocab_size()
        return size

    @property
    def has_chat_template(self) -> bool:
        """Whether the model comes with a chat template."""
        return self._template is not None

    @property
    def tool_template(self) -> str | None:
        """The chat template that presents tools to the model; ``None`` if there is none."""
        template = self._tool_template
        return template if template is not None and takes_tools(template) else None

    @cached_property
    def longest_token(self) -> int:
        """The most bytes of text that one token stands for."""
        # Each character of a byte-level token stands for one byte.
        size = len if self._is_byte_level else lambda token: len(token.encode())
        return max(map(size, self._backend.get_vocab(with_added_tokens=True)))

    @cached_property
    def eos_tokens(self) -> frozenset[int]:
        """Every token that ends a text, according to the generation config, config, tokenizer or chat format."""
        found: set[int] = set()
        for file in ("generation_config.json", "config.json"):
            value = _read_json(self._files, file).get("eos_token_id")
            found.update(value if isinstance(value, list) else [] if value is None else [value])
        names = [token for token in END_TOKENS if token in (self._template or "")]
        if self._config.get("eos_token") is not None:
            names.append(_token_text(self._config["eos_token"]))
        for name in names:
            index = self._backend.token_to_id(name)
            if index is not None:
                found.add(index)
        return frozenset(found)

    @cached_property
    def special_tokens(self) -> Mapping[str, int]:
        """Every special token by its text, such as ``<|im_end|>``."""
        added = self._backend.get_added_tokens_decoder()
        return {token.content: index for index, token in added.items() if token.special}

    def is_added(self, text: str) -> bool:
        """Whether a text is an added token of the vocabulary, special or not."""
        return any(token.content == text for token in self._backend.get_added_tokens_decoder().values())

    @cached_property
    def line_ends(self) -> NDArray[np.int64]:
        """The tokens that contain a line end, ascending."""
        return np.array([token for token in range(self.vocab_size) if b"\n" in self.token_bytes(token)])

    def encode(self, text: str, *, special: bool) -> list[int]:
        """The tokens of a text; ``special`` adds those that the model expects around it (such as BOS)."""
        if len(text) <= _LONG:
            tokens: list[int] = self._backend.encode(text, add_special_tokens=special).ids
        else:  # a batch releases the interpreter lock, so other threads can run meanwhile
            tokens = self._backend.encode_batch_fast([text], add_special_tokens=special)[0].ids
        return tokens

    def encode_inside(self, text: str) -> list[int]:
        """The tokens of a text that is not at the beginning, without the space that some tokenizers put in front."""
        if self._is_byte_level:
            return self.encode(text, special=False)
        front = self.encode("\n", special=False)
        whole = self.encode(f"\n{text}", special=False)
        return whole[len(front) :] if whole[: len(front)] == front else self.encode(text, special=False)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special tokens; bytes that form no character become U+FFFD."""
        text: str = self._backend.decode(list(tokens), skip_special_tokens=True)
        return text

    def encode_with_starts(self, text: str, *, special: bool) -> Placed:
        """Like :meth:`encode`, but also says where each token starts.

        A token starts where the one before it ends, so a leading space belongs to its word even if the tokenizer's own
        offsets leave it out.
        """
        encoded = self._backend.encode(text, add_special_tokens=special)
        starts, end = [], 0
        for first, last in encoded.offsets:
            starts.append(min(first, end))
            end = max(last, end)
        return Placed(encoded.ids, starts)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """The tokens of a conversation, up to where the assistant's answer begins.

        Args:
            messages: ``{"role": ..., "content": ...}``, oldest first.
            tools: tools that the model may call; for models with a :attr:`tool_template`.

        Raises:
            InputError: the model has no chat template, or the template refuses the messages.
        """
        return self.encode(self.chat_text(messages, tools), special=False)

    def chat_text(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> str:
        """The text that :meth:`chat` encodes.

        Raises:
            InputError: the model has no chat template, or the template refuses the messages.
        """
        from jinja2 import TemplateError

        template = self._template if tools is None else self._tool_template
        if template is None:
            raise InputError(
                "messages", self._files.name, "the model has no chat template; give a plain prompt"
            )
        special = {
            key: _token_text(value)
            for key, value in self._config.items()
            if key in ("bos_token", "eos_token", "unk_token", "pad_token") and value is not None
        }
        try:
            return render_chat(template, self._harmless(messages), special, self._harmless(tools))
        except (TemplateError, TypeError, KeyError, RecursionError) as error:
            raise InputError("messages", list(messages), f"the chat template says: {error}") from error

    def _harmless(self, value: Any) -> Any:
        """The same messages or tools, with texts that cannot begin or end a turn.

        A document may contain ``<|im_end|>``; a space after the first character turns it into plain text.
        """
        if isinstance(value, str):
            return self._controls.sub(lambda found: f"{found[0][0]} {found[0][1:]}", value)
        if isinstance(value, Mapping):
            return {self._harmless(name): self._harmless(inner) for name, inner in value.items()}
        return [self._harmless(inner) for inner in value] if isinstance(value, list | tuple) else value

    @cached_property
    def _controls(self) -> re.Pattern[str]:
        """Matches the special tokens of the chat format and those that end a text."""
        templates = f"{self._template or ''}{self._tool_template or ''}"
        used = [
            text
            for text, token in self.special_tokens.items()
            if text in templates or token in self.eos_tokens
        ]
        longest_first = sorted(used, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def definition(self) -> str:
        """The tokenizer as the JSON of a ``tokenizer.json``, for libraries that read one."""
        text: str = self._backend.to_str()
        return text

    @cached_property
    def fingerprint(self) -> str:
        """Identifies this tokenizer, independent of where its files are: the same for all models that share it."""
        return hashlib.blake2b(self.definition().encode(), digest_size=16).hexdigest()

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for inside a text; empty for a special or unknown token."""
        piece = self._backend.id_to_token(token)
        if piece is None or token in self._special:
            return b""
        if self._is_byte_level:
            return _unmap(piece)
        if self._is_byte(token):
            return bytes([int(piece[3:5], 16)])
        return self._inside([token]).encode()

    @cached_property
    def _decoder_kinds(self) -> frozenset[str]:
        if self._backend.decoder is None:
            return frozenset()
        decoder = json.loads(self._backend.decoder.__getstate__())
        return frozenset(step["type"] for step in decoder.get("decoders", [decoder]))

    @cached_property
    def _is_byte_level(self) -> bool:
        return self._decoder_kinds == {"ByteLevel"}

    @cached_property
    def _special(self) -> frozenset[int]:
        return frozenset(self.special_tokens.values())

    def _is_byte(self, token: int) -> bool:
        """Whether a token is one byte of a character that the vocabulary lacks, ``<0x..>``."""
        if "ByteFallback" not in self._decoder_kinds:
            return False
        piece = self._backend.id_to_token(token) or ""
        return len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">")

    @cached_property
    def _anchor(self) -> list[int]:
        return self.encode("a", special=False)

    def _inside(self, tokens: list[int]) -> str:
        """The text of tokens that are not at the beginning, where decoders keep the leading space."""
        return self.decode([*self._anchor, *tokens])[len(self.decode(self._anchor)) :]


class TextStream:
    """Text from tokens that arrive one by one.

    The results of ``push`` and ``finish``, joined, equal ``tokenizer.decode`` of all tokens. The cost of a push does
    not depend on the length of the text. Characters of several tokens are held back until they are complete.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        # Byte tokens <0x..> are decoded one run at a time: one wrong byte turns its whole run into U+FFFD.
        self._run: list[int] = []
        self._is_first = True

    def fork(self) -> TextStream:
        """A copy in the same state, for tokens that may be taken back."""
        other = TextStream(self._tokenizer)
        other._utf8.setstate(self._utf8.getstate())
        other._run = list(self._run)
        other._is_first = self._is_first
        return other

    def push(self, token: int) -> str:
        """The text that ``token`` completes; often empty in the middle of a character."""
        if token in self._tokenizer._special or self._tokenizer._backend.id_to_token(token) is None:
            return ""
        if self._tokenizer._is_byte_level:
            return self._utf8.decode(self._tokenizer.token_bytes(token))
        if self._tokenizer._is_byte(token):
            self._run.append(token)
            return ""
        return self._flush() + self._decode([token])

    def finish(self) -> str:
        """The rest: text held back as the beginning of a character."""
        if self._tokenizer._is_byte_level:
            return self._utf8.decode(b"", final=True)
        return self._flush()

    def _flush(self) -> str:
        run, self._run = self._run, []
        return self._decode(run) if run else ""

    def _decode(self, tokens: list[int]) -> str:
        if self._is_first:
            self._is_first = False
            return self._tokenizer.decode(tokens)
        return self._tokenizer._inside(tokens)


def _byte_alphabet() -> dict[str, int]:
    """The printable character that byte-level BPE writes for each byte (GPT-2, ``bytes_to_unicode``)."""
    spans = (("!", "~"), ("¡", "¬"), ("®", "ÿ"))
    printable = [byte for first, last in spans for byte in range(ord(first), ord(last) + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_alphabet()


def _unmap(piece: str) -> bytes:
    # An added token may hold other characters; the decoder then leaves it as it is.
    if all(character in _BYTES for character in piece):
        return bytes(_BYTES[character] for character in piece)
    return piece.encode()


def _load_backend(files: ModelFiles) -> Any:
    path = files.folder / "tokenizer.json"
    if path.is_file():
        from tokenizers import Tokenizer as Backend

        return Backend.from_file(str(path))
    # An older folder with only a sentencepiece or vocabulary file: transformers knows how to convert it.
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(
        files.folder, local_files_only=True, trust_remote_code=False
    )
    return tokenizer.backend_tokenizer


def _read_json(files: ModelFiles, name: str) -> dict[str, Any]:
    path = files.folder / name
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return content


def _chat_template(files: ModelFiles, config: Mapping[str, Any], name: str) -> str | None:
    path = files.folder / "chat_template.jinja"
    if path.is_file() and name == "default":
        return path.read_text(encoding="utf-8")
    template = _read_json(files, "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}.get(name)
    elif name != "default":
        template = None
    return str(template) if template else None


def _token_text(token: Any) -> str:
    """The text of a special token in tokenizer_config.json, which is stored as a string or as an object."""
    return str(token["content"] if isinstance(token, dict) else token)


@dataclass(frozen=True, slots=True)
class PlacedText:
    """A prompt followed by parts, tokenised as a whole.

    Attributes:
        tokens: token ids.
        starts: index of the character at which each token starts.
        borders: index of the character at which each part starts.
    """

    tokens: Sequence[int]
    starts: Sequence[int]
    borders: Sequence[int]


def encode_text(tokenizer: Tokenizer, prompt: TextPrompt, lead: str = "") -> list[int]:
    """The tokens of a prompt and of the answer's beginning, ``lead``.

    Raises:
        InputError: the chat template refuses the messages.
    """
    return list(place_text(tokenizer, prompt, (lead,)).tokens)


def place_text(tokenizer: Tokenizer, prompt: TextPrompt, parts: Sequence[str]) -> PlacedText:
    """The tokens of a prompt followed by parts, and where each token and part starts.

    Raises:
        InputError: the chat template refuses the messages.
    """
    templated = False
    if isinstance(prompt, str):
        text = prompt
    elif tokenizer.has_chat_template:
        text, templated = tokenizer.chat_text(prompt), True
    else:
        text = plain_text(prompt)
    borders = []
    for part in parts:
        borders.append(len(text))
        text += part
    # A chat template itself writes the tokens that begin every text.
    placed = tokenizer.encode_with_starts(_clean(text), special=not templated)
    return PlacedText(placed.tokens, placed.starts, borders)


def plain_text(messages: Sequence[Mapping[str, str]]) -> str:
    """A conversation as plain text, for a model without a chat template."""
    return "\n\n".join(message["content"] for message in messages) + "\n"


def _clean(text: str) -> str:
    # A tokenizer refuses half a surrogate pair, as found in damaged JSON; each is replaced by one character.
    return text.encode("utf-8", "replace").decode("utf-8")
