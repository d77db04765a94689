"""How documents become vectors: what a caller may choose, once for each knowledge base."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specrag.errors import InputError
from specrag.retrieval.disk import KnowledgeBaseError
from specrag.retrieval.manifest import ChunkingRecord, Manifest

if TYPE_CHECKING:
    from specrag.retrieval.encoder import Encoder

DEFAULT_ENCODER = "minilm-l6-v2"
DEFAULT_DTYPE = "bf16"
DEFAULT_CHUNKING = ChunkingRecord(tokens=200, overlap=32)

_SMALLEST_CHUNK = 16
_SPECIAL_TOKENS = 2  # that an encoder puts around a text


@dataclass(frozen=True, slots=True)
class BuildSettings:
    """``None`` takes what the knowledge base was made with, or for a new one the default.

    Args:
        encoder: name of a sentence encoder (default ``minilm-l6-v2``).
        encoder_dtype: its numbers while it encodes (default ``bf16``).
        chunk_tokens: most tokens of a passage (default 200).
        chunk_overlap: tokens that a passage repeats of the one before (default 32).
    """

    encoder: str | None = None
    encoder_dtype: str | None = None
    chunk_tokens: int | None = None
    chunk_overlap: int | None = None


@dataclass(frozen=True, slots=True)
class SettledSettings:
    """:class:`BuildSettings` with nothing left open."""

    encoder: str
    encoder_dtype: str
    chunking: ChunkingRecord


def settle(settings: BuildSettings, folder: Path, old: Manifest | None) -> SettledSettings:
    """Fill in what was left open.

    Args:
        folder: the knowledge base, for the message.
        old: its manifest; None for a new one.

    Raises:
        InputError: a value cannot be used, or is not that of the knowledge base.
    """
    asked = {
        "encoder": settings.encoder,
        "encoder_dtype": settings.encoder_dtype,
        "chunk_tokens": settings.chunk_tokens,
        "chunk_overlap": settings.chunk_overlap,
    }
    made: dict[str, str | int] = {
        "encoder": DEFAULT_ENCODER if old is None else old.encoder.name,
        "encoder_dtype": DEFAULT_DTYPE if old is None else old.encoder.dtype,
        "chunk_tokens": (DEFAULT_CHUNKING if old is None else old.chunking).tokens,
        "chunk_overlap": (DEFAULT_CHUNKING if old is None else old.chunking).overlap,
    }
    for name, value in asked.items():
        if old is not None and value is not None and value != made[name]:
            remedy = (
                f"the knowledge base {str(folder)!r} was made with {made[name]!r}; leave it out, or index into "
                "another folder"
            )
            raise InputError(name, value, remedy)
    tokens = made["chunk_tokens"] if settings.chunk_tokens is None else settings.chunk_tokens
    overlap = made["chunk_overlap"] if settings.chunk_overlap is None else settings.chunk_overlap
    if type(tokens) is not int or tokens < _SMALLEST_CHUNK:
        raise InputError("chunk_tokens", tokens, f"give a whole number of at least {_SMALLEST_CHUNK}")
    if settings.chunk_overlap is None and old is None:
        overlap = min(DEFAULT_CHUNKING.overlap, tokens // 4)
    if type(overlap) is not int or not 0 <= overlap <= tokens // 2:
        raise InputError("chunk_overlap", overlap, f"give a whole number from 0 to {tokens // 2}")
    return SettledSettings(
        encoder=str(made["encoder"] if settings.encoder is None else settings.encoder),
        encoder_dtype=str(
            made["encoder_dtype"] if settings.encoder_dtype is None else settings.encoder_dtype
        ),
        chunking=ChunkingRecord(tokens, overlap),
    )


def load_checked_encoder(
    settings: SettledSettings, folder: Path, old: Manifest | None, given: Encoder | None
) -> Encoder:
    """The encoder of these settings, made sure to be the one that the knowledge base was made with.

    Args:
        given: an encoder that is loaded already, if there is one.

    Raises:
        InputError: there is no such encoder, or it cannot read passages as long as these.
        KnowledgeBaseError: it makes other vectors than those that are there.
    """
    encoder = given
    if encoder is None:
        from specrag.retrieval.encoder import load_encoder  # it imports torch

        encoder = load_encoder(settings.encoder, dtype=settings.encoder_dtype)
    most = encoder.max_tokens - _SPECIAL_TOKENS
    if settings.chunking.tokens > most:
        remedy = f"the encoder {encoder.name!r} reads at most {most} of a text"
        raise InputError("chunk_tokens", settings.chunking.tokens, remedy)
    if old is not None:
        check_fingerprint(encoder, folder, old)
    return encoder


def check_fingerprint(encoder: Encoder, folder: Path, manifest: Manifest) -> None:
    """Make sure that an encoder is the one of a knowledge base.

    Raises:
        KnowledgeBaseError: it makes other vectors than those that are there.
    """
    made = manifest.encoder
    if encoder.fingerprint != made.fingerprint:
        raise KnowledgeBaseError(
            f"encoder: {encoder.name!r} ({encoder.fingerprint}) does not fit the knowledge base {str(folder)!r}, "
            f"made with {made.name!r} ({made.fingerprint}): use that one, or index into another folder"
        )
