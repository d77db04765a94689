"""The memory estimate: above what is really taken, not far above, and said before anything is done."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from specrag.engine import memory
from specrag.engine.executor import run
from specrag.engine.memory import (
    MemoryNeed,
    SessionNeed,
    check_memory,
    estimate_memory,
    free_bytes,
    keys_values_bytes,
    peak_bytes,
    weights_bytes,
)
from specrag.engine.outputs import NOTHING
from specrag.engine.session import Session
from specrag.errors import InputError
from specrag.models.catalog import ModelFiles
from specrag.models.toy import ToyModel
from specrag.models.weights import read_weights
from tests.engine.test_kv import Tree, text, tiny_model

GB = 10**9


@pytest.mark.parametrize(("prompt", "new"), [(20, 1), (150, 40), (400, 100)])
def test_keys_and_values_are_estimated_from_above(prompt: int, new: int) -> None:
    model = tiny_model()
    session = Session(model)
    run(session.extend(text(1, prompt)))
    taken = 0
    for token in text(2, new):
        run(session.score(Tree(), NOTHING))
        session.commit((), token)
        taken = max(taken, session.cache.nbytes)
    estimated = keys_values_bytes(model, prompt + new)
    one_layer = session.cache.nbytes / session.cache.shape.layers
    assert taken <= estimated <= 1.2 * taken + one_layer + 16 * session.cache.shape.bytes_per_token * 2


def test_sessions_add_up_and_passes_follow_each_other() -> None:
    model = tiny_model()
    both = estimate_memory([SessionNeed(model, 300), SessionNeed(model, 100)], weights=7)
    assert both.keys_values == keys_values_bytes(model, 300) + keys_values_bytes(model, 100)
    assert both.working == estimate_memory([SessionNeed(model, 300)]).working > 0
    assert both.total == 7 + both.keys_values + both.working
    assert estimate_memory([SessionNeed(ToyModel(), 300)]).total == 0


def test_what_does_not_fit_is_refused_with_its_parts() -> None:
    need = MemoryNeed(weights=3 * GB, keys_values=2 * GB, working=GB // 10)
    check_memory(need, need.total, "9,000 tokens")
    check_memory(need, None, "9,000 tokens")  # nobody knows what is free
    with pytest.raises(InputError) as caught:
        check_memory(need, need.total - 1, "9,000 tokens")
    said = str(caught.value)
    assert "\n" not in said
    for part in ("9,000 tokens", "5.10 GB", "3.00 GB for weights", "2.00 GB for keys and values", "rag"):
        assert part in said


def test_weights_by_their_headers(smollm2: Path) -> None:
    weights = read_weights(ModelFiles("smollm2-135m", smollm2, "", ""))
    count = sum(tensor.numel() for tensor in weights.values())
    assert weights_bytes(smollm2, "bf16") == 2 * count
    assert weights_bytes(smollm2, "fp32") == 4 * count
    assert count < weights_bytes(smollm2, "int8") < 1.2 * count


def test_free_and_peak_memory_of_this_machine() -> None:
    free, peak = free_bytes(), peak_bytes()
    assert free is not None
    assert peak is not None
    assert 10**6 < free < 10**13
    held = torch.ones(2 * 10**7)  # 80 MB
    grown = peak_bytes()
    assert grown is not None
    assert grown >= held.nbytes


def test_the_control_group_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text(f"{GB}\n")
    (tmp_path / "memory.current").write_text(f"{GB // 2}\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 100000000\n")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    monkeypatch.setattr(memory, "RESERVE", 0)
    assert free_bytes() == GB // 2 + 100000000
    (tmp_path / "memory.max").write_text("max\n")
    free = free_bytes()
    assert free is not None
    assert free > GB // 2


def test_a_header_is_all_that_is_read(tmp_path: Path) -> None:
    header = json.dumps({"a": {"shape": [3, 5]}, "__metadata__": {"format": "pt"}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert weights_bytes(tmp_path, "fp32") == 60
