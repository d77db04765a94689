"""Kept prefixes: the same keys and values in another process, and no others ever."""

from __future__ import annotations

import os
import random
import signal
import stat
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from specrag.engine.executor import run
from specrag.engine.prefix_file import PrefixFileError, load_prefix, remove_unfinished, save_prefix
from specrag.engine.session import Session
from specrag.models.decoder import LeanDecoder
from specrag.models.toy import ToyModel
from tests.engine.test_kv import fresh, next_logits, text, tiny_model
from tests.kills import kills
from tests.power_loss import attempt, check_power_loss, each_failure

ROOT = Path(__file__).resolve().parents[2]

#: Writes two prefixes to one file in turns, in a child for each line it reads, until the child is killed.
WRITER = """
import os, sys
from pathlib import Path
from specrag.engine.prefix_file import save_prefix
from tests.engine.test_prefix_file import IDENTITY, read
from tests.engine.test_kv import text, tiny_model

model = tiny_model()
sessions = [read(model, text(seed, 400)) for seed in (1, 2)]
for _ in sys.stdin:
    child = os.fork()
    while not child:
        for session in sessions:
            save_prefix(Path(sys.argv[1]), session, 400, IDENTITY)
    print(child, flush=True)
    os.waitpid(child, 0)
    print("ended", flush=True)
"""

IDENTITY = {"model": "tiny", "weights": "1f", "dtype": "fp32"}


@pytest.fixture(scope="module")
def model() -> LeanDecoder:
    return tiny_model()


def read(model: LeanDecoder, tokens: list[int]) -> Session:
    session = Session(model)
    run(session.extend(tokens))
    return session


@pytest.fixture
def kept(model: LeanDecoder, tmp_path: Path) -> Path:
    path = tmp_path / "prefixes" / "one.safetensors"
    save_prefix(path, read(model, text(1, 90)), 80, IDENTITY)
    return path


def test_a_loaded_prefix_gives_the_logits_of_a_fresh_one(model: LeanDecoder, kept: Path) -> None:
    session = load_prefix(kept, model, IDENTITY)
    assert session.tokens == text(1, 80)
    assert session.cache.length == 79
    run(session.extend(text(2, 30)))
    np.testing.assert_allclose(next_logits(session), fresh(model, [*text(1, 80), *text(2, 30)]), atol=1e-4)


def test_a_chain_of_extents_is_written_as_one(model: LeanDecoder, tmp_path: Path) -> None:
    first = read(model, text(1, 90))
    second = first.fork(80)
    run(second.extend(text(2, 20)))
    third = second.fork()
    run(third.extend(text(3, 20)))
    assert len(third.cache.runs) == 2
    save_prefix(tmp_path / "chain", third, len(third), IDENTITY)
    session = load_prefix(tmp_path / "chain", model, IDENTITY)
    assert session.tokens == third.tokens
    np.testing.assert_allclose(next_logits(session), next_logits(third), atol=1e-5)


def test_it_is_its_owners_alone_and_leaves_no_other_file(kept: Path) -> None:
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert list(kept.parent.iterdir()) == [kept]


def test_what_a_kill_has_left_is_removed(model: LeanDecoder, kept: Path) -> None:
    """Killed in the middle of writing, by a process of another number or of ours before a restart."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    orphans = [kept.with_name(f".{name}.safetensors.{process}") for name, process in
               (("a", ended.pid), ("b", os.getpid()))]  # fmt: skip
    running = [kept.with_name(f".c.safetensors.{process}") for process in (os.getppid(), os.getpid())]
    for folder in (*orphans, *running):
        folder.mkdir()
        (folder / ".tmp").write_bytes(b"half")
    os.utime(orphans[1], (0, 0))
    remove_unfinished(kept.parent)
    assert set(kept.parent.iterdir()) == {kept, *running}
    orphans[0].mkdir()
    save_prefix(kept, read(model, text(1, 20)), 20, IDENTITY)
    assert set(kept.parent.iterdir()) == {kept, *running}


@pytest.mark.parametrize("field", ["model", "weights", "dtype", "adapter"])
def test_another_models_prefix_is_refused(model: LeanDecoder, kept: Path, field: str) -> None:
    with pytest.raises(PrefixFileError, match=f"computed with {field} .*, here it is 'another'") as caught:
        load_prefix(kept, model, {**IDENTITY, field: "another"})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("place", [0.02, 0.1, 0.5, 0.999])
def test_a_changed_byte_is_noticed(model: LeanDecoder, kept: Path, place: float) -> None:
    data = bytearray(kept.read_bytes())
    data[int(len(data) * place)] ^= 4
    kept.write_bytes(data)
    with pytest.raises(PrefixFileError):
        load_prefix(kept, model, IDENTITY)


@pytest.mark.parametrize("content", [b"", b"no safetensors", b"\xff" * 64])
def test_other_files_are_refused(model: LeanDecoder, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.safetensors"
    path.write_bytes(content)
    with pytest.raises(PrefixFileError, match="damaged"):
        load_prefix(path, model, IDENTITY)


def test_a_file_that_was_cut_is_refused(model: LeanDecoder, kept: Path) -> None:
    kept.write_bytes(kept.read_bytes()[:-100])
    with pytest.raises(PrefixFileError, match="damaged"):
        load_prefix(kept, model, IDENTITY)


def test_a_model_of_another_shape_is_refused(kept: Path) -> None:
    with pytest.raises(PrefixFileError, match="takes no keys and values"):
        load_prefix(kept, ToyModel(), IDENTITY)


def test_no_file_is_no_damage(model: LeanDecoder, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_prefix(tmp_path / "none", model, IDENTITY)


def test_a_failed_write_leaves_the_old_file(model: LeanDecoder, kept: Path, tmp_path: Path) -> None:
    before = kept.read_bytes()
    with pytest.raises(PrefixFileError, match="read it first"):
        save_prefix(kept, read(model, text(1, 20)), 80, IDENTITY)
    assert kept.read_bytes() == before
    (tmp_path / "file").write_text("")
    with pytest.raises(PrefixFileError, match="cannot be written"):
        save_prefix(tmp_path / "file" / "x", read(model, text(1, 20)), 20, IDENTITY)
    if os.geteuid() != 0:
        kept.parent.chmod(0o500)
        with pytest.raises(PrefixFileError, match="cannot be written"):
            save_prefix(kept, read(model, text(1, 20)), 20, IDENTITY)


def test_a_power_loss_leaves_a_whole_prefix_or_none(model: LeanDecoder, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    old, new = read(model, text(1, 30)), read(model, text(2, 40))

    def seen(root: Path) -> list[int] | None:
        path = root / "prefixes" / "one.safetensors"
        return load_prefix(path, model, IDENTITY).tokens if path.exists() else None

    path = disk / "prefixes" / "one.safetensors"
    for session, before in ((old, [None]), (new, [old.tokens])):
        save = partial(save_prefix, path, session, len(session), IDENTITY)
        check_power_loss(disk, save, seen, before=before, after=session.tokens)


def test_a_failing_disk_leaves_a_whole_prefix(model: LeanDecoder, tmp_path: Path) -> None:
    path = tmp_path / "prefixes" / "one.safetensors"
    old, new = read(model, text(1, 30)), read(model, text(2, 40))
    for failing in each_failure(tmp_path):
        save_prefix(path, old, len(old), IDENTITY)
        refused = attempt(failing, lambda: save_prefix(path, new, len(new), IDENTITY))
        assert not refused or "cannot be written" in refused
        found = load_prefix(path, model, IDENTITY).tokens
        assert found in ((old.tokens, new.tokens) if refused else (new.tokens,))
        assert list(path.parent.iterdir()) == [path]


@pytest.mark.slow
def test_a_kill_leaves_a_whole_prefix_and_nothing_that_is_not_removed(
    model: LeanDecoder, tmp_path: Path
) -> None:
    path = tmp_path / "prefix.safetensors"
    command = [sys.executable, "-c", WRITER, str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    writer = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert writer.stdin is not None
    assert writer.stdout is not None
    for _ in range(kills(5)):
        writer.stdin.write("\n")
        writer.stdin.flush()
        child = int(writer.stdout.readline())
        time.sleep(random.uniform(0.02, 0.1))
        os.kill(child, signal.SIGKILL)
        assert writer.stdout.readline() == "ended\n"
        session = load_prefix(path, model, IDENTITY)
        assert session.tokens in (text(1, 400), text(2, 400))
        remove_unfinished(tmp_path)
        assert list(tmp_path.iterdir()) == [path]
    writer.stdin.close()
    assert writer.wait(30) == 0
    writer.stdout.close()
