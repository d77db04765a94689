"""Which replica has read which prompt prefixes, so that it need not read them again."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import TypeAlias

#: Bytes of a prompt in one block, and the estimated number of their tokens.
BLOCK_BYTES, BLOCK_TOKENS = 512, 128

#: The most blocks of a prompt that are considered, and of a replica that are remembered as read.
MOST_BLOCKS, REMEMBERED = 64, 4096

#: A prompt's blocks: for each, the hash of it and everything before it.
Blocks: TypeAlias = Sequence[bytes]


def prompt_bytes(body: Mapping[str, object]) -> bytes:
    """The prompt or the messages of a request's body; equal beginnings give equal bytes."""
    prompt = body.get("messages", body.get("prompt", ""))
    return json.dumps(prompt, ensure_ascii=False).encode("utf-8", "replace")


def blocks_of(prompt: bytes) -> Blocks:
    """The full blocks with which a prompt begins.

    Two prompts of 1,200 bytes that differ in byte 700 share the first of their two blocks.
    """
    found: list[bytes] = []
    known = b""
    for start in range(0, min(len(prompt) - BLOCK_BYTES + 1, MOST_BLOCKS * BLOCK_BYTES), BLOCK_BYTES):
        known = blake2b(known + prompt[start : start + BLOCK_BYTES], digest_size=16).digest()
        found.append(known)
    return found


class ReadPrefixes:
    """The blocks that one replica has read most recently; bounded."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def known(self, blocks: Blocks) -> int:
        """How many of a prompt's first blocks the replica has read."""
        return next((place for place, block in enumerate(blocks) if block not in self._blocks), len(blocks))

    def add(self, blocks: Blocks) -> None:
        """Note that the replica reads a prompt."""
        for block in reversed(blocks):  # the first block is the one that most prompts share
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > REMEMBERED:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        """Forget everything: the replica was away, and what it had read is gone."""
        self._blocks.clear()
