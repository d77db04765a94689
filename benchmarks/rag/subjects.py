"""Who answers: servers of one interface, what each is sent, and the knowledge base that some of them search."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.rag.questions import PASSAGES, RagQuestion
from benchmarks.server.subjects import (
    ADAPTIVE,
    PLAIN,
    VLLM_VARIABLE,
    ServerProcess,
    our_server,
    vllm_methods,
    vllm_server,
)
from specrag.models.catalog import resolve
from specrag.models.tokenizer import Tokenizer

#: Ours; the last two find the passages themselves, in a knowledge base of those that are asked for.
OURS = (PLAIN, ADAPTIVE)
PLAIN_BF16 = "plain+bf16"
KB, BLOCKS = "knowledge base", "knowledge base, blocks"
OPENVINO, LLAMA = "openvino", "llama.cpp"

_PEERS = Path(__file__).resolve().parents[1] / "server" / "peers"
#: Of a passage in the knowledge base: the most that the encoder reads, and more than nearly all of them have.
_CHUNK_TOKENS = "254"


@dataclass(frozen=True)
class Subjects:
    """Makes servers, and requests to them.

    Args:
        model: of all of them.
        out: the knowledge base is made there.
        openvino: the Python of its environment, and the exported model's folder.
        llama: the folder of ``node-llama-cpp``, and a GGUF file.
    """

    model: str
    out: Path
    openvino: Sequence[str] | None = None
    llama: Sequence[str] | None = None

    def available(self) -> tuple[str, ...]:
        """The methods that can be measured here."""
        peers = ((OPENVINO, self.openvino), (LLAMA, self.llama))
        return (*OURS, PLAIN_BF16, KB, BLOCKS, *vllm_methods(), *(name for name, given in peers if given))

    def server(self, method: str, asked: Sequence[RagQuestion]) -> ServerProcess:
        """A method's server.

        Args:
            asked: all questions to come, whose passages the knowledge base holds.
        """
        if method in OURS:  # each keeps its own prompts
            return our_server(self.model, "cpu")
        if method == PLAIN_BF16:
            return our_server(self.model, "cpu", ["--dtype", "bf16"])
        if method in (KB, BLOCKS):
            return our_server(self.model, "cpu", ["--kb", f"passages={self._knowledge_base(asked)}"])
        if method == OPENVINO:
            assert self.openvino
            python, folder = self.openvino
            return ServerProcess([python, "-P", str(_PEERS / "openvino.py"), folder, "{port}"])
        if method == LLAMA:
            assert self.llama
            return ServerProcess(["node", str(_PEERS / "llama_cpp.mjs"), *self.llama, "{port}"])
        words = ["--enable-prefix-caching"]
        return vllm_server(os.environ[VLLM_VARIABLE], resolve(self.model).folder, method, words=words)

    def body(self, method: str, question: RagQuestion, new: int) -> dict[str, Any]:
        """A greedy request.

        Args:
            new: most tokens of the answer.
        """
        body = {"messages": list(question.messages), "max_tokens": new, "temperature": 0}
        if method in (*OURS, PLAIN_BF16):
            return {**body, "model": self.model, "specrag": {"method": method.removesuffix("+bf16")}}
        if method in (KB, BLOCKS):
            asked = [{"role": "user", "content": question.question}]
            options = {"reuse": "blocks" if method == BLOCKS else "exact"}
            found = {"kb": "passages", "index": "bm25", "k": PASSAGES, "abstain": False}
            ours = {**found, "method": "standard-rag", "options": options}
            return {**body, "messages": asked, "model": self.model, "specrag": ours}
        if method in (OPENVINO, LLAMA):
            prompt = self._tokenizer.chat(question.messages)
            return {**body, "prompt": prompt, "stop_token_ids": sorted(self._tokenizer.eos_tokens)}
        return {**body, "model": "model"}

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer(resolve(self.model))

    def _knowledge_base(self, asked: Sequence[RagQuestion]) -> Path:
        """The questions' passages, a document each, read by the model as they are indexed."""
        documents, base = self.out / "documents", self.out / "passages"
        documents.mkdir(exist_ok=True)
        for passage in {passage.id: passage for one in asked for passage in one.passages}.values():
            name = re.sub(r"\W+", " ", passage.title)[:80].strip()
            text = f"# {passage.title}\n\n{passage.text}\n"
            (documents / f"{name} {passage.id}.md").write_text(text, encoding="utf-8")
        words = ["--kb", str(base), "--read", "--model", self.model]
        if not base.exists():  # chunking is chosen once
            words += ["--chunk-tokens", _CHUNK_TOKENS]
        command = [sys.executable, "-m", "specrag", "index", str(documents), *words]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return base
