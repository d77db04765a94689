"""OpenVINO GenAI behind the part of OpenAI's interface that the benches use, for one client at a time.

``PYTHON openvino.py FOLDER PORT``, by the Python of an environment that has ``openvino-genai``; nothing of specrag is
imported. FOLDER is what ``optimum-cli export openvino --weight-format int8`` has written. A request gives its prompt as
token ids in ``prompt``, so that every engine reads the same tokens.
"""

import json
import sys
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import numpy as np
import openvino
import openvino_genai

#: Gigabytes of keys and values that are kept for prompts to come, as much as the benches give vLLM.
_CACHE = 2


class Tokens(openvino_genai.StreamerBase):  # type: ignore[misc]  # it has no types
    """Hands tokens on as they come."""

    def __init__(self, take: Any) -> None:
        super().__init__()
        self._take = take

    def write(self, token: int | Sequence[int]) -> openvino_genai.StreamingStatus:
        """Called with each new token, or with several."""
        self._take([token] if isinstance(token, int) else list(token))
        return openvino_genai.StreamingStatus.RUNNING

    def end(self) -> None:
        """Called behind the last one."""


class Handler(BaseHTTPRequestHandler):
    """Answers ``/health`` and streamed chat completions."""

    pipeline: openvino_genai.LLMPipeline
    tokenizer: openvino_genai.Tokenizer

    def do_GET(self) -> None:
        """Ready, as the server listens when the model is loaded."""
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def do_POST(self) -> None:
        """A greedy answer, an event for each token."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = body["max_tokens"]
        config.do_sample = False
        config.ignore_eos = bool(body.get("ignore_eos"))
        config.stop_token_ids = set(body["stop_token_ids"])
        config.eos_token_id = body["stop_token_ids"][0]
        tokens: list[int] = []
        said = ""

        def take(new: list[int]) -> None:
            nonlocal said
            tokens.extend(new)
            text = self.tokenizer.decode(tokens)
            self._send({"choices": [{"delta": {"content": text[len(said) :]}}]})
            said = text

        prompt = np.array([body["prompt"]], dtype=np.int64)
        inputs = openvino_genai.TokenizedInputs(
            openvino.Tensor(prompt), openvino.Tensor(np.ones_like(prompt))
        )
        self.pipeline.generate(inputs, config, Tokens(take))
        usage = {"prompt_tokens": prompt.size, "completion_tokens": len(tokens)}
        self._send({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def _send(self, chunk: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.flush()

    def log_message(self, *_: Any) -> None:
        """Nothing is logged."""


def main() -> None:
    """Load, and answer until the process ends."""
    folder, port = sys.argv[1:]
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = True
    scheduler.cache_size = _CACHE
    Handler.pipeline = openvino_genai.LLMPipeline(folder, "CPU", scheduler_config=scheduler)
    Handler.tokenizer = Handler.pipeline.get_tokenizer()
    HTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()


if __name__ == "__main__":
    main()
