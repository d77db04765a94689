"""Real vLLM servers, in the environment that `make test-vllm` makes; without it these tests are skipped."""

from __future__ import annotations

import http.client
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.server.subjects import VLLM, VLLM_SPECRAG, ServerProcess, vllm_server
from specrag.models.catalog import resolve
from specrag.models.tokenizer import Tokenizer
from specrag.speculation.suffix import build_corpus

ENVIRONMENT = os.environ.get("SPECRAG_VLLM_ENV", "")
CLIENTS = 16
#: Prompts whose answers are compared; fewer for a machine that has no time for all of them.
PROMPTS = int(os.environ.get("SPECRAG_VLLM_PROMPTS", "120"))
ARTICLES = [
    json.loads(line)
    for line in (Path(__file__).parents[2] / "data" / "wikipedia-summaries" / "summaries.jsonl")
    .read_text(encoding="utf-8")
    .splitlines()
]
_ASKED = (
    "Repeat the following text word by word.",
    "Say in your own words what this is about.",
    "List the most important facts of this text, with quotations.",
    "Write a question about this text, and answer it.",
    "Translate the first sentence into French, then go on with a story.",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = "SPECRAG_VLLM_ENV names no environment with vLLM: make test-vllm makes one"
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(1800))
            if not ENVIRONMENT:
                item.add_marker(pytest.mark.skip(reason=reason))


@dataclass(frozen=True)
class Counts:
    """Guesses that a server has verified and accepted so far."""

    drafted: int
    accepted: int


class Client:
    """Asks a server."""

    def __init__(self, port: int) -> None:
        self.port = port

    def ask(self, prompt: str, new: int, extra: Mapping[str, Any] | None = None) -> str:
        body = {"model": "model", "prompt": prompt, "max_tokens": new, "temperature": 0, "ignore_eos": True}
        if extra is not None:
            body["vllm_xargs"] = extra
        answer = json.loads(self._request("POST", "/v1/completions", body))
        text: str = answer["choices"][0]["text"]
        return text

    def ask_all(self, asked: Sequence[tuple[str, int]], clients: int = CLIENTS) -> list[str]:
        """Many at once; the answers in the order of the prompts."""
        with ThreadPoolExecutor(clients) as pool:
            return list(pool.map(lambda one: self.ask(*one), asked))

    def leave_early(self, prompt: str, new: int) -> None:
        """Begin to read an answer, and hang up."""
        body = {"model": "model", "prompt": prompt, "max_tokens": new, "temperature": 0, "stream": True}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == 200
        assert response.readline().startswith(b"data: ")
        connection.close()

    def counts(self) -> Counts:
        text = self._request("GET", "/metrics", None)
        found = []
        for name in ("draft", "accepted"):
            lines = re.findall(rf"(?m)^vllm:spec_decode_num_{name}_tokens_total{{.*}} (\S+)$", text)
            found.append(int(sum(map(float, lines))))
        return Counts(*found)

    def accepted(self, prompt: str, new: int, extra: Mapping[str, Any] | None = None) -> int:
        """Guesses that were accepted in an answer, while nobody else asks."""
        before = self.counts().accepted
        self.ask(prompt, new, extra)
        return self.counts().accepted - before

    def _request(self, verb: str, path: str, body: Mapping[str, Any] | None) -> str:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request(verb, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            text = response.read().decode()
            assert response.status == 200, text
            return text
        finally:
            connection.close()


@pytest.fixture(scope="session")
def prompts() -> list[tuple[str, int]]:
    """Prompts of different lengths, with the tokens to write."""
    made = []
    for number, article in enumerate(ARTICLES):
        for way, asked in enumerate(_ASKED):
            text = article["text"][: 300 + 150 * (number % 5)]
            made.append((f"{text}\n\n{asked}\n\n", 12 + 7 * ((number + way) % 5)))
    return made[:PROMPTS]


@contextmanager
def serving(folder: Path, method: str, **environment: str) -> Iterator[Client]:
    """A server in fp32, where an answer does not depend on what else is in its batch."""
    python = str(Path(ENVIRONMENT) / "bin" / "python")
    words = ["--enforce-eager"]
    # On one core: two threads that others keep from running at once wait for one another most of the time.
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": str(max(os.sched_getaffinity(0))),
        "OMP_NUM_THREADS": "1",
        **environment,
    }
    server: ServerProcess = vllm_server(
        python, folder, method, dtype="float32", words=words, environment=environment
    )
    with server, server.awake() as port:
        yield Client(port)


@pytest.fixture(scope="session")
def plain_answers(smollm2: Path, prompts: list[tuple[str, int]]) -> list[str]:
    """What vLLM answers without a proposer, one after the other."""
    with serving(smollm2, VLLM) as client:
        return client.ask_all(prompts, 4)


@pytest.fixture(scope="session")
def settings(
    tmp_path_factory: pytest.TempPathFactory, smollm2: Path, plain_answers: list[str]
) -> dict[str, str]:
    """A corpus of a sixth of the answers, so that the small model's text stands in it, and a memory."""
    tokenizer = Tokenizer(resolve("smollm2-135m"))
    texts = [tokenizer.encode(answer, special=False) for answer in plain_answers[: PROMPTS // 6]]
    folder = tmp_path_factory.mktemp("corpus") / "corpus"
    build_corpus(texts, folder, tokenizer=tokenizer.fingerprint)
    return {"SPECRAG_CORPUS": str(folder), "SPECRAG_ANSWER_MEMORY": "100000"}


@pytest.fixture(scope="module")
def client(smollm2: Path, settings: dict[str, str]) -> Iterator[Client]:
    """Of a server with the drafter, the corpus and the memory."""
    with serving(smollm2, VLLM_SPECRAG, **settings) as client:
        yield client
