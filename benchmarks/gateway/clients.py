"""Clients that ask at random while something is done to the replicas, and judge every answer."""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import httpx

#: What may stand in place of an answer: all replicas are busy, have failed, cannot be reached, or were too slow.
CLEAR = frozenset({429, 502, 503, 504})

#: ``wrong``: another text than alone; ``told``: a clear error; ``lost``: neither an answer nor a clear error; ``late``:
#: nothing in time.
Outcome = Literal["right", "wrong", "told", "lost", "late"]


@dataclass(frozen=True, slots=True)
class Question:
    """A greedy request with the text that it is answered with when nobody else asks.

    Attributes:
        body: of the chat request.
        text: ``None`` until it is known.
    """

    body: Mapping[str, Any]
    text: str | None = None


def mixed_questions(model: str, kb: str, *, tokens: int = 8) -> list[Question]:
    """Two requests of every kind that runs through a gateway.

    Args:
        model: as the gateway calls it.
        kb: a knowledge base of :func:`tests.sample.build_sample`.
        tokens: of an answer.
    """
    iterative = {"interval": 2, "query_tokens": 6, "passage_tokens": 32}
    methods: list[Mapping[str, Any] | None] = [
        None,
        {"method": "standard-rag", "k": 2},
        {"method": "sequential", "options": iterative},
        {"method": "ralmspec", "options": iterative},
        {"method": "speculative-rag", "k": 4, "options": {"drafts": 2, "draft_tokens": 16}},
    ]
    found = []
    for asked in ("Who discovered radium?", "What is copper?"):
        for method in methods:
            messages = [{"role": "user", "content": asked}]
            body = {"model": model, "messages": messages, "max_tokens": tokens, "temperature": 0}
            found.append(Question(body if method is None else {**body, "specrag": {"kb": kb, **method}}))
    return found


def alone(url: str, questions: Sequence[Question]) -> list[Question]:
    """The same with their texts, each asked for while nothing else runs."""
    found = []
    for question in questions:
        answer = httpx.post(_chat(url), json=question.body, timeout=600)
        answer.raise_for_status()
        found.append(Question(question.body, answer.json()["choices"][0]["message"]["content"]))
    return found


def ask_until(
    over: threading.Event,
    url: str,
    questions: Sequence[Question],
    clients: int,
    *,
    seconds: float = 120.0,
    tell: Callable[[Question, Outcome, str], None] = lambda *_: None,
) -> Counter[Outcome]:
    """Let clients ask at random, streamed and whole, until an event; how their requests ended.

    Args:
        over: ends it; requests under way are waited for.
        url: of the gateway.
        clients: at the same time.
        seconds: without a byte after which an answer is late.
        tell: called with each request that was not answered rightly, its outcome and what was said.
    """

    def client(seed: int) -> Counter[Outcome]:
        chance, counted = random.Random(seed), Counter[Outcome]()
        with httpx.Client(timeout=seconds) as http:
            while not over.is_set():
                question = chance.choice(questions)
                outcome, said = ask_once(http, url, question, stream=chance.random() < 0.5)
                counted[outcome] += 1
                if outcome != "right":
                    tell(question, outcome, said)
                if outcome == "told":
                    over.wait(0.2)  # a client that is refused does not ask again at once
        return counted

    with ThreadPoolExecutor(clients) as threads:
        return sum(threads.map(client, range(clients)), Counter[Outcome]())


def ask_once(http: httpx.Client, url: str, question: Question, *, stream: bool) -> tuple[Outcome, str]:
    """How one request ends, and what was said."""
    try:
        if stream:
            return _streamed(http, url, question)
        answer = http.post(_chat(url), json=question.body)
        if answer.status_code != 200:
            return _refused(answer)
        text = answer.json()["choices"][0]["message"]["content"]
        return ("right" if text == question.text else "wrong"), text
    except httpx.TimeoutException:
        return "late", "nothing came"
    except httpx.HTTPError as error:
        return "lost", f"{type(error).__name__}: {error}"


def _streamed(http: httpx.Client, url: str, question: Question) -> tuple[Outcome, str]:
    """A stream that ends with an error must have shown the beginning of the right text."""
    text, ended = "", False
    with http.stream("POST", _chat(url), json={**question.body, "stream": True}) as answer:
        if answer.status_code != 200:
            answer.read()
            return _refused(answer)
        for line in answer.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                ended = ended or line == "data: [DONE]"
                continue
            event = json.loads(line[6:])
            if "error" in event:
                is_begin = (question.text or "").startswith(text)
                return ("told" if is_begin and event["error"].get("message") else "lost"), line
            text += "".join(choice["delta"].get("content") or "" for choice in event.get("choices", ()))
    if not ended:
        return "lost", f"the stream broke off behind {text!r}"
    return ("right" if text == question.text else "wrong"), text


def _refused(answer: httpx.Response) -> tuple[Outcome, str]:
    try:
        message = answer.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = ""
    return ("told" if answer.status_code in CLEAR and message else "lost"), f"{answer.status_code} {message}"


def _chat(url: str) -> str:
    return f"{url}/v1/chat/completions"
