"""Approximate reuse: keys and values of a passage, computed once on its own, and pasted where it is needed.

Pasted keys and values have not seen the passages in front of them, so the answer is no longer what the model would
write: it is off by default. The first tokens of each passage are read again in place (EPIC, Hu et al. 2024), because
attention leans on them. The passages of a knowledge base may have been read when it was made
(:mod:`specrag.methods.block_files`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from specrag.engine import Coroutine, Movable, Search, Session
from specrag.errors import InputError
from specrag.methods.prompts import passage_block

if TYPE_CHECKING:
    from specrag.methods.base import LocalModel
    from specrag.methods.block_files import BlockFiles
    from specrag.retrieval import Passage

#: Which parts of a prompt are not read again.
Reuse: TypeAlias = Literal["exact", "blocks"]

#: First tokens of each passage that are still read in place.
ANEW = 16

#: Fewer tokens than this are read rather than pasted: a passage's keys and values cost a pass of their own.
WORTH_PASTING = 24


@dataclass(frozen=True, slots=True)
class PastedPrompt:
    """A prompt whose passages have been pasted.

    Attributes:
        session: holds the prompt up to the end of the last passage.
        known: tokens that did not have to be read now.
    """

    session: Session
    known: int


@dataclass(frozen=True, slots=True)
class Block:
    """A passage in a prompt: tokens ``start`` to ``end``, which follow its number."""

    passage: Passage
    start: int
    end: int


def check_reuse(llm: object) -> None:
    """Check that a model can keep passages' keys and values, and move them.

    Raises:
        InputError: it cannot.
    """
    model = getattr(getattr(llm, "loaded", None), "model", None)
    if not isinstance(model, Movable):
        raise InputError("reuse", "blocks", "this model's keys cannot be moved; take exact")
    if not llm.prefixes.limit_bytes:  # type: ignore[attr-defined]
        raise InputError(
            "reuse", "blocks", "give the model a prefix cache (prefix_cache_bytes) to keep them in"
        )


def pasting(
    llm: LocalModel,
    prompt: Sequence[int],
    passages: Sequence[Passage],
    tenant: str,
    files: BlockFiles | None = None,
) -> Coroutine[PastedPrompt]:
    """Begin a prompt with its passages' stored keys and values; unknown passages are read alone, and stored.

    Args:
        prompt: token ids.
        passages: in the order of the prompt; one that is not found in it word for word is read as usual.
        tenant: the passages' owner; other tenants' are not found.
        files: passages that were read before; asked for those that are not in memory.

    Raises:
        ContextLengthError: the prompt does not fit.
    """
    head = template_head(llm)
    session = llm.prefixes.start(llm.loaded.model, prompt, tenant, pasted=True)
    known = len(session)
    try:
        for block in find_blocks(llm, prompt, passages):
            first = block.start + ANEW
            if first < len(session) or block.end - first < WORTH_PASTING:
                continue
            tokens = alone(head, prompt[block.start : block.end])
            source, read = yield from _source(llm, block.passage, tokens, tenant, files)
            anew = prompt[len(session) : first]
            yield from session.paste(source, len(head) + ANEW, len(tokens) - 1, anew)
            source.close()
            known += 0 if read else block.end - first
    except BaseException:
        session.close()
        raise
    llm.prefixes.keep(session, tenant, pasted=True)
    return PastedPrompt(session, known)


def alone(head: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """The tokens of a passage read alone, plus one, since the cache never holds a session's newest token."""
    return [*head, *tokens, head[0] if head else tokens[0]]


def _source(
    llm: LocalModel, passage: Passage, tokens: Sequence[int], tenant: str, files: BlockFiles | None
) -> Coroutine[tuple[Session, bool]]:
    """A session that holds a passage alone, from memory, from its file or by reading; and whether it was read."""
    # One extra token, since the returned session lacks the last one.
    session = llm.prefixes.start(llm.loaded.model, [*tokens, tokens[-1]], tenant)
    if len(session) == len(tokens):
        return session, False
    if files is not None:
        found: Session | None = yield Search(lambda: files.find(passage, tokens))
        if found is not None:
            session.close()
            return found, False
    yield from session.extend(tokens[len(session) :])
    llm.prefixes.keep(session, tenant)
    return session, True


def passage_tokens(llm: LocalModel, passage: Passage) -> list[int]:
    """A passage's tokens in a prompt, after its number; without the last one, which may span what follows."""
    return llm.tokenizer.encode(passage_block(passage), special=False)[:-1]


def template_head(llm: LocalModel) -> list[int]:
    """The beginning of every prompt: the template's tokens in front of the first message."""
    one, other = (llm.encode([{"role": "user", "content": text}]) for text in ("0", "1"))
    return one[
        : next(place for place, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1])
    ]


def find_blocks(llm: LocalModel, prompt: Sequence[int], passages: Sequence[Passage]) -> list[Block]:
    """Where the passages stand in the prompt."""
    found: list[Block] = []
    behind = 0
    for passage in passages:
        tokens = passage_tokens(llm, passage)
        if not tokens:  # of a passage of one token
            continue
        for start in range(behind, len(prompt) - len(tokens) + 1):
            if prompt[start] == tokens[0] and list(prompt[start : start + len(tokens)]) == tokens:
                behind = start + len(tokens)
                found.append(Block(passage, start, behind))
                break
    return found
