"""Real vLLM servers, in the environment that `make test-vllm` makes; without it these tests are skipped."""

from __future__ import annotations

import http.client
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
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
#: Prompts whose answers are compared.
PROMPTS = 100
Prompts = list[tuple[str, int]]
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


#: Stories that the corpus holds.
_STORIES = (10, 14)
NEW = 40


def story(number: int) -> str:
    """A prompt for an answer that hardly repeats anything."""
    return f"{ARTICLES[number]['title']} and {ARTICLES[number + 1]['title']}: a short story.\n\n"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = "SPECRAG_VLLM_ENV names no environment with vLLM: make test-vllm makes one"
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(900))
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
def prompts() -> Prompts:
    """Prompts of different lengths, with the tokens to write, so that rows end, move and are replaced all the time."""
    made = []
    for number, article in enumerate(ARTICLES):
        for way, asked in enumerate(_ASKED):
            text = article["text"][: 160 + 60 * (number % 5)]  # reading takes most of the time
            made.append((f"{text}\n\n{asked}\n\n", 24 + 2 * ((number + way) % 5)))
    return made[:PROMPTS]


def _server(folder: Path, method: str, core: int, **environment: str) -> ServerProcess:
    """A server in fp32, where an answer does not depend on what else is in its batch; on a core of its own."""
    python = str(Path(ENVIRONMENT) / "bin" / "python")
    words = ["--enforce-eager"]
    environment = {"VLLM_CPU_OMP_THREADS_BIND": str(core), "OMP_NUM_THREADS": "1", **environment}
    return vllm_server(python, folder, method, dtype="float32", words=words, environment=environment)


class Served:
    """A server with the drafter, which can be started again, and what vLLM answers without.

    Attributes:
        client: of the server that runs now.
        plain: answers without a proposer, by prompt.
        answers: the first server's.
        counts: its guesses in them.
        has_restarted: whether it has been started again: with a corpus of stories that the first server has told.
        told, guessed: those stories, and the guesses that were accepted in them.
    """

    client: Client
    plain: list[str]
    answers: list[str]
    counts: Counts
    told: list[str]
    guessed: int

    def __init__(self, model: Path, folder: Path, prompts: Prompts, stack: ExitStack) -> None:
        self._model, self._folder, self._stack = model, folder, stack
        self._core = max(os.sched_getaffinity(0))
        self.memory = folder / "answers"
        self._settings = {"SPECRAG_ANSWER_MEMORY": "100000", "SPECRAG_ANSWER_FOLDER": str(self.memory)}
        self._server = _server(model, VLLM_SPECRAG, self._core, **self._settings)
        self.has_restarted = False
        plain = _server(model, VLLM, min(os.sched_getaffinity(0)))
        # Side by side: starting and answering take a core each, and this suite has minutes.
        with ThreadPoolExecutor(2) as pool:
            asked = pool.submit(_answers, plain, prompts)
            self.client = self._start()
            self.answers = self.client.ask_all(prompts)
            self.counts = self.client.counts()
            self.plain = asked.result()

    def restart(self) -> None:
        """Kill the server and start it again, once."""
        if self.has_restarted:
            return
        self.tell()
        self._server.kill()
        tokenizer = Tokenizer(resolve("smollm2-135m"))
        texts = [tokenizer.encode(text, special=False) for text in self.told]
        build_corpus(texts, self._folder / "corpus", tokenizer=tokenizer.fingerprint)
        settings = {**self._settings, "SPECRAG_CORPUS": str(self._folder / "corpus")}
        self._server = _server(self._model, VLLM_SPECRAG, self._core, **settings)
        self.client = self._start()
        self.has_restarted = True

    def tell(self) -> None:
        """Have the stories told."""
        before = self.client.counts().accepted
        self.told = [self.client.ask(story(number), NEW) for number in _STORIES]
        self.guessed = self.client.counts().accepted - before

    def _start(self) -> Client:
        self._stack.enter_context(self._server)
        return Client(self._stack.enter_context(self._server.awake()))


def _answers(server: ServerProcess, prompts: Prompts) -> list[str]:
    with server, server.awake() as port:
        return Client(port).ask_all(prompts)


@pytest.fixture(scope="session")
def served(smollm2: Path, prompts: Prompts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for all tests, since its start takes most of their time."""
    with ExitStack() as stack:
        yield Served(smollm2, tmp_path_factory.mktemp("vllm"), prompts, stack)
