"""The drafter's memory of earlier answers, and its file."""

from __future__ import annotations

import json
import logging
import random
import stat
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from specrag.artifacts import LOCK, exclusive_lock
from specrag.integrations.vllm import memory as vllm_memory
from specrag.integrations.vllm.memory import FILE, AnswerFile, AnswerMemory
from specrag.integrations.vllm.requests import TENANT
from tests.integrations.vllm_batches import Asked, Engine, config

MODEL = {"name": "a", "tokenizer": "b"}


def answer(length: int = 60, first: int = 0) -> np.ndarray:
    """Tokens of which none comes twice."""
    return np.array(random.sample(range(first, first + 1000), length), dtype=np.int32)


def file(folder: Path, model: dict[str, str] = MODEL, vocabulary: int = 10_000) -> AnswerFile:
    return AnswerFile(folder, model, vocabulary)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are on the disk at once."""
    monkeypatch.setattr(vllm_memory, "DELAY", 0.01)


def eventually(holds: Callable[[], bool]) -> None:
    ends = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < ends
        time.sleep(0.005)


def written(folder: Path, memory: AnswerMemory) -> None:
    """Write a memory, and wait until it is on the disk."""
    file(folder).keep(memory)
    eventually((folder / FILE).is_file)


def read(
    folder: Path, tokens: int = 1000, model: dict[str, str] = MODEL, vocabulary: int = 10_000
) -> AnswerMemory:
    memory = AnswerMemory(tokens)
    file(folder, model, vocabulary).read(memory)
    return memory


def matched(memory: AnswerMemory, tenant: str, tail: np.ndarray) -> int:
    found = memory.find(tenant, tail)
    return 0 if found is None else found.match.length


@pytest.fixture
def kept(tmp_path: Path) -> dict[str, np.ndarray]:
    """Answers of two tenants that ``tmp_path`` keeps."""
    answers = {"acme": answer(), "Größe\n": answer(40, 2000)}
    memory = AnswerMemory(1000)
    for tenant, tokens in answers.items():
        assert memory.add(tenant, tokens)
        assert memory.add(tenant, tokens[:5])
    written(tmp_path / "answers", memory)
    return answers


def test_answers_outlive_a_restart_with_their_tenants(tmp_path: Path, kept: dict[str, np.ndarray]) -> None:
    memory = read(tmp_path / "answers")
    assert len(memory) == 60 + 40 + 2 * 6 + 2
    for tenant, tokens in kept.items():
        assert matched(memory, tenant, tokens[:30]) == 30
        (other,) = kept.keys() - {tenant}
        assert matched(memory, other, tokens[:30]) == 0
    assert [part.tokens.tolist().count(-1) for part in memory.parts()] == [2, 2]
    assert stat.S_IMODE((tmp_path / "answers").stat().st_mode) == 0o700


def test_a_smaller_memory_takes_the_newest(tmp_path: Path, kept: dict[str, np.ndarray]) -> None:
    memory = read(tmp_path / "answers", tokens=90)
    assert 0 < len(memory) <= 90
    assert matched(memory, "acme", kept["acme"][:30]) == 0
    assert matched(memory, "Größe\n", kept["Größe\n"][:30]) == 30


def _flip(data: bytes) -> bytes:
    """Another tenant's name, one bit away."""
    assert data.count(b'"acme"') == 1
    return data.replace(b'"acme"', b'"acmd"')


def test_what_cannot_be_used_is_left_out(
    tmp_path: Path, kept: dict[str, np.ndarray], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "answers" / FILE
    whole = path.read_bytes()
    with caplog.at_level(logging.WARNING, "vllm.specrag"):
        assert len(read(tmp_path / "none")) == 0
        assert not caplog.records
        for data, said in (
            (_flip(whole), "its checksum is another"),
            (whole[:-4], "its checksum is another"),
            (b"", "its checksum is another"),
            (whole[:-4] + bytes([1, 2, 3, 4]), "its checksum is another"),
        ):
            path.write_bytes(data)
            assert len(read(tmp_path / "answers")) == 0
            assert said in caplog.records[-1].getMessage()
        path.write_bytes(whole)
        assert len(read(tmp_path / "answers", model={**MODEL, "tokenizer": "c"})) == 0
        assert "it is of another model" in caplog.records[-1].getMessage()
        assert len(read(tmp_path / "answers", vocabulary=500)) == 0
        assert "its tokens are not the model's" in caplog.records[-1].getMessage()
        assert len(caplog.records) == 6
    assert len(read(tmp_path / "answers")) > 0


def test_one_process_writes_a_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    memory = AnswerMemory(1000)
    memory.add("acme", answer())

    def busy() -> None:
        raise AssertionError

    with exclusive_lock(tmp_path / LOCK, busy), caplog.at_level(logging.WARNING, "vllm.specrag"):
        file(tmp_path).keep(memory)
        eventually(lambda: bool(caplog.records))
    assert caplog.records[0].getMessage().endswith("answers are not written (another process writes there)")
    assert not (tmp_path / FILE).exists()


def test_a_disk_that_refuses_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "taken").write_text("a file", encoding="utf-8")
    memory = AnswerMemory(1000)
    memory.add("acme", answer())
    with caplog.at_level(logging.WARNING, "vllm.specrag"):
        file(tmp_path / "taken").keep(memory)
        eventually(lambda: bool(caplog.records))
        file(tmp_path / "taken").read(memory)
    assert "answers are not written" in caplog.records[0].getMessage()
    assert len(caplog.records) == 2


def test_a_server_that_is_started_again_copies_from_earlier_answers(tmp_path: Path) -> None:
    said = answer(60).tolist()
    accepted = []
    for _ in range(2):
        engine = Engine(config(answer_memory=10_000, answer_folder=str(tmp_path)), named=True)
        engine.drafter.load_model(None)
        asked = engine.add(Asked("one", answer(30, 3000).tolist(), said, {TENANT: "acme"}))
        engine.run()
        accepted.append(asked.accepted)
        engine.add(Asked("two", answer(30, 3000).tolist(), answer(5, 5000).tolist()))
        engine.run()
        eventually((tmp_path / FILE).is_file)
    assert accepted[0] == 0
    assert accepted[1] > 30
    header = json.loads((tmp_path / FILE).read_bytes().split(b"\n")[1])
    assert {tenant for tenant, _ in header["parts"]} == {"acme"}  # nothing of the made-up row
