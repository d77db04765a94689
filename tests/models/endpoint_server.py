"""A real HTTP server that speaks the OpenAI protocol and fails on request, for tests of the client's side."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import uvicorn

from specrag.engine.executor import run
from specrag.engine.outputs import NOTHING, Outputs
from specrag.engine.session import Session
from specrag.language_model import LanguageModel

MODEL = "small"
Fault = Literal["drop", "slow", "drip", "500", "no-log-probs", "nonsense", "html", "long"]


@dataclass(frozen=True)
class Token:
    """A token with its text and, behind another, its log-probability."""

    id: int
    text: str
    log_prob: float | None


class Backend(Protocol):
    """What stands behind the protocol."""

    def encode(self, text: str) -> list[int]: ...

    def chat_text(self, messages: Sequence[Mapping[str, str]]) -> str: ...

    def score(self, tokens: Sequence[int]) -> list[Token]: ...

    def write(self, tokens: Sequence[int], body: Mapping[str, Any]) -> tuple[str, list[Token], str]: ...


@dataclass
class FakeServer:
    """What the server can do and how it fails.

    Attributes:
        can: of ``prompt_logprobs, echo, echo-zero, chat, models``.
        faults: for the next calls, one each; an empty text is none.
        seen: the bodies that came, with their path and the key.
    """

    backend: Backend
    can: set[str] = field(
        default_factory=lambda: {"prompt_logprobs", "echo", "echo-zero", "chat", "models", "continue"}
    )
    faults: deque[str] = field(default_factory=deque)
    seen: list[dict[str, Any]] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    url: str = ""

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        raw = b""
        more = True
        while more:
            message = await receive()
            raw += message.get("body", b"")
            more = message.get("more_body", False)
        body = json.loads(raw) if raw else {}
        path = scope["path"].removeprefix("/v1")
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        self.seen.append({"path": path, "key": headers.get("authorization"), **body})
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await self._serve(path, body, send)
        finally:
            self.at_once -= 1

    async def _serve(self, path: str, body: dict[str, Any], send: Any) -> None:
        fault = self.faults.popleft() if self.faults and path != "/models" else ""
        if fault == "drop":  # promises more than it sends
            await _start(send, 200, length=1000)
            await send({"type": "http.response.body", "body": b"{", "more_body": False})
            return
        if fault == "slow":
            await asyncio.sleep(30)
        if fault == "drip":
            await _start(send, 200)
            for _ in range(300):
                await send({"type": "http.response.body", "body": b" ", "more_body": True})
                await asyncio.sleep(0.1)
        if fault == "500":
            await _answer(send, 500, {"error": {"message": "out of order"}})
            return
        if fault == "long":
            said = "This model's maximum context length is 8 tokens"
            await _answer(send, 400, {"error": {"message": said}})
            return
        if fault == "html":
            await _start(send, 200, kind=b"text/html")
            await send({"type": "http.response.body", "body": b"<p>Welcome</p>", "more_body": False})
            return
        if fault == "nonsense":
            await _answer(send, 200, {"choices": [{"text": 7}]})
            return
        status, answer = await asyncio.to_thread(self._work, path, body)
        if fault == "no-log-probs":
            for choice in answer["choices"]:
                choice.pop("logprobs", None)
                choice.pop("prompt_logprobs", None)
        await _answer(send, status, answer)

    def _work(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if path == "/models" and "models" in self.can:
            return 200, {"data": [{"id": MODEL, "max_model_len": 2048}]}
        if path == "/completions":
            prompt = body["prompt"]
            return self._complete(
                self.backend.encode(prompt) if isinstance(prompt, str) else prompt, body, False
            )
        if path == "/chat/completions" and "chat" in self.can:
            messages = body["messages"]
            if body.get("continue_final_message"):
                if "continue" not in self.can:
                    return 400, {"error": {"message": "unknown field continue_final_message"}}
                text = self.backend.chat_text(messages[:-1]) + messages[-1]["content"]
            else:
                text = self.backend.chat_text(messages)
            return self._complete(self.backend.encode(text), body, True)
        return 404, {"error": {"message": f"no {path} here"}}

    def _complete(self, tokens: list[int], body: dict[str, Any], chat: bool) -> tuple[int, dict[str, Any]]:
        echo = bool(body.get("echo")) and "echo" in self.can
        if body["max_tokens"] == 0 and not (echo and "echo-zero" in self.can):
            return 400, {"error": {"message": "max_tokens must be at least 1"}}
        text, reason = "", "length"
        written: list[Token] = []
        if body["max_tokens"]:
            text, written, reason = self.backend.write(tokens, body)
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason}
        scored = self.backend.score(tokens) if echo or "prompt_logprobs" in body else []
        told = [*scored, *written] if echo else written
        if chat:
            choice["message"] = {"role": "assistant", "content": text}
            content = [{"token": token.text, "logprob": token.log_prob, "bytes": None} for token in told]
            choice["logprobs"] = {"content": content} if body.get("logprobs") else None
        else:
            choice["text"] = "".join(token.text for token in scored) * echo + text
            choice["logprobs"] = (
                {
                    "tokens": [token.text for token in told],
                    "token_logprobs": [token.log_prob for token in told],
                }
                if body.get("logprobs") is not None
                else None
            )
        answer: dict[str, Any] = {"choices": [choice], "usage": {"prompt_tokens": len(tokens)}}
        if "prompt_logprobs" in body and "prompt_logprobs" in self.can:
            found = [
                None
                if token.log_prob is None
                else {str(token.id): {"logprob": token.log_prob, "decoded_token": token.text}}
                for token in scored
            ]
            (answer if chat else choice)["prompt_logprobs"] = found
        return 200, answer


class ModelBackend:
    """A real model behind the protocol; one request after the other."""

    def __init__(self, llm: LanguageModel) -> None:
        self._llm = llm
        self._turn = threading.Lock()

    def encode(self, text: str) -> list[int]:
        return self._llm.tokenizer.encode(text, special=False)

    def chat_text(self, messages: Sequence[Mapping[str, str]]) -> str:
        return self._llm.tokenizer.chat_text(messages)

    def score(self, tokens: Sequence[int]) -> list[Token]:
        """Every token behind those before it, read without any sharing."""

        def reading() -> Any:
            session = Session(self._llm.model)
            wanted = [Outputs(log_probs_of=(token,)) for token in tokens[1:]]
            rows = yield from session.extend([*tokens, 0], [*wanted, NOTHING])
            session.close()
            found = [row.log_probs for row in rows[: len(wanted)]]
            return [None, *(float(one[0]) for one in found if one is not None)]

        with self._turn:
            log_probs = run(reading())
        return [
            Token(token, self._text(token), log_prob)
            for token, log_prob in zip(tokens, log_probs, strict=True)
        ]

    def write(self, tokens: Sequence[int], body: Mapping[str, Any]) -> tuple[str, list[Token], str]:
        with self._turn:
            written = self._llm.generate(
                list(tokens),
                max_tokens=body["max_tokens"],
                stop=body.get("stop", ()),
                temperature=body.get("temperature", 0.0),
                seed=body.get("seed", 0),
                log_probs=0,
                method="plain",
            )
        told = [Token(token.token, self._text(token.token), token.log_prob) for token in written.tokens]
        return written.text, told, written.finish_reason

    def _text(self, token: int) -> str:
        return self._llm.tokenizer.token_bytes(token).decode(errors="replace") or f"<{token}>"


class CannedBackend:
    """Characters as tokens, each with the same log-probability; writes ``" four"``."""

    def __init__(self, pause: float = 0.0) -> None:
        self._pause = pause

    def encode(self, text: str) -> list[int]:
        return [ord(character) for character in text]

    def chat_text(self, messages: Sequence[Mapping[str, str]]) -> str:
        return "".join(f"<{message['role']}>{message['content']}" for message in messages) + "<assistant>"

    def score(self, tokens: Sequence[int]) -> list[Token]:
        return [Token(token, chr(token), -1.0 if number else None) for number, token in enumerate(tokens)]

    def write(self, tokens: Sequence[int], body: Mapping[str, Any]) -> tuple[str, list[Token], str]:
        time.sleep(self._pause)
        told = [Token(1, " four", -0.5), Token(2, "<end>", -0.25)][: body["max_tokens"]]
        return " four", told, "stop" if len(told) > 1 else "length"


@contextmanager
def served(server: FakeServer) -> Iterator[FakeServer]:
    """Run the server on a free port while the block runs."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server.url = f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
        config = uvicorn.Config(
            server, log_level="critical", lifespan="off", ws="none", http="h11", loop="asyncio",
            timeout_graceful_shutdown=1,
        )  # fmt: skip
        running = uvicorn.Server(config)
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        while not running.started:
            time.sleep(0.005)
        try:
            yield server
        finally:
            running.should_exit = True
            running.force_exit = True
            thread.join()


async def _start(
    send: Any, status: int, *, length: int | None = None, kind: bytes = b"application/json"
) -> None:
    headers = [(b"content-type", kind)]
    if length is not None:
        headers.append((b"content-length", str(length).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def _answer(send: Any, status: int, body: dict[str, Any]) -> None:
    content = json.dumps(body).encode()
    await _start(send, status, length=len(content))
    await send({"type": "http.response.body", "body": content, "more_body": False})
