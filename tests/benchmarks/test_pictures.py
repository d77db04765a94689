"""``python -m benchmarks.pictures`` and ``benchmarks.rag.picture``: what is drawn from which records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import pictures
from benchmarks.rag.picture import bars, draw
from benchmarks.rag.subjects import OPENVINO
from benchmarks.server.subjects import ADAPTIVE, PLAIN, VLLM


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_a_picture_shows_all_its_tasks_from_the_record_and_stands_on_a_page(name: str) -> None:
    picture = pictures.PICTURES[name]
    shown = picture.shown()
    assert {one.task for one in shown} == set(picture.tasks.values())
    assert all(one.speedup and one.baseline == picture.baseline for one in shown)
    assert len({(one.task, one.method) for one in shown}) == len(shown) > 2
    results = Path(pictures.__file__).parents[1] / "docs" / "results"
    assert (results / f"{name}.png").is_file()
    assert any(f"({name}.png)" in page.read_text(encoding="utf-8") for page in results.glob("*.md"))


def test_the_bars_are_those_of_the_cell_with_most_methods_and_one_client(tmp_path: Path) -> None:
    def answer(method: str, total: float, clients: int = 1, **setting: Any) -> dict[str, Any]:
        told = {"setting": {"model": "m", **setting}, "draw": "uniform", "clients": clients}
        return {**told, "method": method, "first": total / 2, "total": total}

    records = [answer(ADAPTIVE, 1.0), answer(ADAPTIVE, 3.0), answer(VLLM, 4.0), answer(PLAIN, 9.0)]
    records += [
        answer(ADAPTIVE, 7.0, new=8),
        answer(ADAPTIVE, 7.0, clients=4),
        answer(OPENVINO, 7.0, clients=4),
    ]
    found = bars(records)
    assert found == {("m", "uniform"): {"specrag, 8 bits": (1.0, 2.0), "vLLM, bf16": (2.0, 4.0)}}
    assert draw(tmp_path / "picture.png", found).stat().st_size > 5_000


def test_without_passages_plain_decoding_stands_for_specrag() -> None:
    told = {"setting": {"model": "m", "alone": True}, "draw": "uniform", "clients": 1, "first": 1.0}
    seconds = {PLAIN: 2.0, ADAPTIVE: 9.0, VLLM: 4.0}
    found = bars([{**told, "method": method, "total": total} for method, total in seconds.items()])
    assert found["m", "uniform"] == {"specrag, 8 bits": (1.0, 2.0), "vLLM, bf16": (1.0, 4.0)}
