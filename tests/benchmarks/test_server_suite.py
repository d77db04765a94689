"""``specrag bench server``: a short run with the real server, and what it measures with."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("fastapi")

from benchmarks.server import subjects
from benchmarks.server.clients import Answered
from benchmarks.server.suite import _Servers, suite
from specrag.bench.measurement import Measurement, check_method, from_json_lines
from specrag.cli.main import app
from specrag.errors import SpecragError


def bench(out: Path, *words: str) -> list[Measurement]:
    command = ["bench", "server", "--quick", "--no-plots", "--out", str(out), "--json", "-", *words]
    result = CliRunner().invoke(app, command)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return from_json_lines(result.stdout)


@pytest.mark.slow
def test_a_quick_run_measures_both_methods_and_resumes(smollm2: Path, tmp_path: Path) -> None:
    found = bench(tmp_path, "--repeats", "1")
    assert {(entry.task, entry.method) for entry in found} == {
        (f"clients {count}", method) for count in (1, 4) for method in ("plain", "adaptive")
    }
    for entry in found:
        assert entry.tokens_per_second is not None
        assert float(str(entry.extra["first_token_ms"])) <= float(str(entry.extra["answer_ms"]))
        assert "failures" not in entry.extra
        if entry.method == "adaptive":
            assert entry.mat is not None
            assert entry.mat >= 1
    drawn = suite().pictures(found, tmp_path)
    assert [path.name for path in drawn] == ["server-tokens-per-second.png", "server-first-token-ms.png"]
    # Everything is in the records: no server is started again.
    assert bench(tmp_path, "--repeats", "1") == found


@pytest.mark.parametrize(("words", "dtype"), [((), "bf16"), (("--dtype", "int8"), "int8")])
def test_our_server_holds_its_weights_as_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: tuple[str, ...], dtype: str
) -> None:
    """Not as it chooses: 8 bits are its own default on many CPUs, and a page names what it compares."""
    asked: list[Sequence[str]] = []

    def refused(model: str, device: str, more: Sequence[str]) -> subjects.ServerProcess:
        asked.append(more)
        raise SpecragError("not today")

    monkeypatch.setattr(subjects, "our_server", refused)
    assert all("failures" in entry.extra for entry in bench(tmp_path, *words))
    assert asked
    assert all(more == ["--dtype", dtype] for more in asked)


def test_no_method_finds_what_another_has_had_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are asked the same prompts, and a server keeps what it has read."""
    started: list[nullcontext[object]] = []

    def made(*_: object) -> nullcontext[object]:
        started.append(nullcontext(object()))
        return started[-1]

    monkeypatch.setattr(subjects, "our_server", made)
    context: Any = SimpleNamespace(model="smollm2-135m", device="cpu", dtype="bf16")
    with ExitStack() as stack:
        servers = _Servers(context, stack)
        assert servers._get("plain") is servers._get("plain")
        assert servers._get("plain") is not servers._get("adaptive")
    assert len(started) == 2


def test_no_server_is_measured_where_the_others_left_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six servers once filled a machine, which then stood still."""
    monkeypatch.setattr(subjects, "our_server", lambda *_: nullcontext(object()))
    monkeypatch.setattr("specrag.engine.memory.free_bytes", lambda: 10**9)
    context: Any = SimpleNamespace(model="smollm2-135m", device="cpu", dtype="bf16")
    with ExitStack() as stack:
        servers = _Servers(context, stack)
        servers._get("adaptive")
        with pytest.raises(SpecragError, match=r"2 servers stand ready and leave 1\.0 GB .* --method,"):
            servers.trial("plain", 1, lambda _: [])()


def test_an_answer_counts_until_a_client_is_idle() -> None:
    answer = Answered("text", tokens=40, sent=100.0, first=1.0, total=5.0)
    assert [answer.until(moment) for moment in (99.0, 101.0, 102.0, 105.0, 110.0)] == [0, 0, 10, 40, 40]


def test_a_server_that_does_not_start_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        pytest.raises(SpecragError, match="did not start: no such thing"),
        subjects.ServerProcess(["/bin/sh", "-c", "echo no such thing; exit 3"]),
    ):
        pass


def test_a_stopped_server_goes_on_when_it_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the guard: the process is gone behind the block."""
    import http.client

    monkeypatch.setattr(subjects.ServerProcess, "_is_ready", lambda self: answers(self.port))

    def answers(port: int, seconds: float = 5) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=seconds)
        try:
            connection.request("GET", "/")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    import sys

    words = [sys.executable, "-m", "http.server", "{port}", "--bind", "127.0.0.1"]
    with subjects.ServerProcess(words) as server:
        assert not answers(server.port, 0.3)
        with server.awake() as port:
            assert answers(port)
        process = server._process
        assert process is not None
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


_COUNTS = """
import http.server, json, sys

class Handler(http.server.BaseHTTPRequestHandler):
    asked = []

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(self.asked).encode())

    def do_POST(self):
        self.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"])
        self.send_response(200)
        self.end_headers()
        usage = {"prompt_tokens": 1, "completion_tokens": 1}
        self.wfile.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\\n\\n".encode())

http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_stopped_server_answers_once_before_it_is_measured() -> None:
    """Memory that was not touched for seconds is slow where the hypervisor watches it."""
    import sys
    import urllib.request

    with subjects.ServerProcess([sys.executable, "-c", _COUNTS, "{port}"]) as server:
        for turn in (1, 2):
            with (
                server.awake(subjects.greeting("plain")) as port,
                urllib.request.urlopen(f"http://127.0.0.1:{port}/asked") as answer,
            ):
                assert json.load(answer) == [[{"role": "user", "content": subjects.WAKING}]] * turn


_KILLED = """
import os, signal
from benchmarks.server.subjects import ServerProcess
ServerProcess._is_ready = lambda self: True
server = ServerProcess(["/bin/sh", "-c", "sleep 300 & sleep 300"])
server.__enter__()
print(server._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_bench_leaves_no_server_behind() -> None:
    import subprocess
    import sys
    import time

    said = subprocess.run([sys.executable, "-c", _KILLED], capture_output=True, text=True, check=False)
    group = int(said.stdout)
    ends = time.monotonic() + 20
    while time.monotonic() < ends:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    os.killpg(group, 9)
    pytest.fail("the server's processes are still there")


def test_every_method_has_a_name_that_may_be_published() -> None:
    for method in (
        subjects.PLAIN,
        subjects.ADAPTIVE,
        subjects.VLLM,
        subjects.VLLM_NGRAM,
        subjects.VLLM_SUFFIX,
        subjects.VLLM_SPECRAG,
    ):
        check_method(method)
        assert subjects.request(method, "Hi", 8)["max_tokens"] == 8
