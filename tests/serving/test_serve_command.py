"""``specrag serve`` as a real process: settings, errors before anything is loaded, and its end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import httpx
import pytest

from specrag.cli import main as frame
from tests.cli.shell import COMMAND
from tests.serving.live_server import wait_for


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--host", "0.0.0.0"], "host: '0.0.0.0' is not usable"),
        (["--max-qeue", "3"], "did you mean --max-queue?"),
        (["--max-queue"], "give a value behind it"),
        (["--max-queue", "many"], "--max-queue: "),
        (
            ["--method", "respek"],
            "--method: 'respek' is not usable: did you mean respec? take one of adaptive, plain, ",
        ),
        (["--kb", "nowhere"], "'nowhere' does not exist"),
        (["--kb", "My Base"], "--kb: 'My Base' is not usable: 'My Base' is no name, which has small letters"),
        (["--kb", "a=b", "--kb", "c="], "--kb: 'c=' is not usable: give --kb NAME=FOLDER"),
        (["--datastores", "x="], "--datastores: 'x=' is not usable: give --datastores NAME=FOLDER"),
        (["--kb", "docs=/nonexistent/kb"], "nonexistent"),
        (["--dtype", "int3"], "dtype"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_work_is_said_in_one_line(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert frame.run(["serve", *args]) == 1
    told = capsys.readouterr().err
    assert message in told
    assert len(told.strip().splitlines()) == 1


def test_every_setting_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    from specrag.serving.settings import Settings

    flags = {f"--{name.replace('_', '-')}" for name in Settings.model_fields}
    assert frame.run(["serve", "--list-settings"]) == 0
    listed = capsys.readouterr().out
    assert all(flag in listed for flag in flags)
    assert frame.run(["serve", "--list-settings", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == flags


def test_it_serves_until_it_is_told_to_stop_and_ends_a_stream_before(
    smollm2: Path, sample_base: Path, tmp_path: Path
) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = (tmp_path / "log").open("wb")
    command = [
        *COMMAND,
        "serve",
        "--kb",
        f"wiki={sample_base}",
        "--port",
        str(port),
        "--shutdown-seconds",
        "0.5",
    ]
    process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
    url = f"http://127.0.0.1:{port}"
    try:

        def ready() -> bool:
            assert process.poll() is None, (tmp_path / "log").read_text()
            try:
                return httpx.get(f"{url}/readyz").status_code == 200
            except httpx.HTTPError:
                return False

        wait_for(ready, 120)
        # The environment's settings hold for it as well, and its page is there.
        assert "text/html" in httpx.get(url).headers["content-type"]
        body = {
            "model": "smollm2-135m",
            "messages": [{"role": "user", "content": "Tell a long story."}],
            "stream": True,
            "max_tokens": 4000,
            "ignore_eos": True,
        }
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["error"]["code"] == "stopping"
        assert process.wait(30) in (0, -signal.SIGTERM)
    finally:
        process.kill()
        process.wait(10)
        log.close()


def test_a_model_that_cannot_be_loaded_ends_it_with_a_status(smollm2: Path, tmp_path: Path) -> None:
    """A supervisor sees the end; who asks meanwhile is told no path of the machine."""
    broken = tmp_path / "broken"
    shutil.copytree(smollm2, broken)
    for file in broken.glob("*.safetensors"):
        file.write_bytes(b"no weights")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [*COMMAND, "serve", "--model", str(broken), "--port", str(port)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1, ended.stderr
    assert ended.stderr.splitlines()[-1].startswith("error: model file")
    assert "Traceback" not in ended.stderr
