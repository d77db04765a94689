"""An OpenAI server that answers at once: what is left is the gateway's own cost. Takes a port."""

from __future__ import annotations

import asyncio
import json
import sys

_MODEL = "instant"
_ANSWER = 4  # pieces


def _events() -> bytes:
    found: list[dict[str, object]] = []
    for number in range(_ANSWER):
        end = "stop" if number == _ANSWER - 1 else None
        choice = {"index": 0, "delta": {"content": "word "}, "finish_reason": end}
        found.append({"id": "x", "object": "chat.completion.chunk", "model": _MODEL, "choices": [choice]})
    usage = {"prompt_tokens": 600, "completion_tokens": _ANSWER, "total_tokens": 600 + _ANSWER}
    found.append(
        {"id": "x", "object": "chat.completion.chunk", "model": _MODEL, "choices": [], "usage": usage}
    )
    return b"".join(b"data: %s\n\n" % json.dumps(event).encode() for event in found) + b"data: [DONE]\n\n"


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    models = json.dumps({"object": "list", "data": [{"id": _MODEL, "object": "model"}]}).encode()
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = [
                int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")
            ]
            await reader.readexactly(sum(length))
            is_chat = b"/chat/completions " in head.split(b"\r\n")[0]
            kind, body = (b"text/event-stream", _events()) if is_chat else (b"application/json", models)
            answer = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n%s"
            writer.write(answer % (kind, len(body), body))
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


async def _main(port: int) -> None:
    server = await asyncio.start_server(_serve, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1])))
