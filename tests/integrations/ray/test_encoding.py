"""Knowledge bases whose passages are encoded by the nodes of a real cluster."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

pytest.importorskip("ray")

from specrag.errors import InputError, SpecragError
from specrag.integrations.ray import ClusterEncoder, connect
from specrag.retrieval.build import build
from specrag.retrieval.encoder.encoder import Encoder, load_encoder
from specrag.retrieval.knowledge_base import KnowledgeBase
from specrag.retrieval.progress import Progress
from tests.integrations.ray.conftest import add_worker
from tests.sample import SUMMARIES

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

pytestmark = pytest.mark.filterwarnings("default")  # Ray warns of itself


@pytest.fixture(scope="module")
def encoder(model_home: Path) -> Encoder:
    return load_encoder("minilm-l6-v2", dtype="fp32")


def scores_in(folder: Path) -> list[list[tuple[str, float]]]:
    """All passages with their scores for a few questions: bits that differ in a vector differ in a score."""
    questions = ["Which metal conducts best?", "Who discovered radium?", "Which river reaches the Black Sea?"]
    with KnowledgeBase.open(folder) as base:
        found = base.search(questions, len(base), index="flat")
    return [[(hit.passage.text, hit.score) for hit in hits] for hits in found]


def nodes_dead() -> int:
    """How many nodes the cluster has found dead so far."""
    import ray

    return sum(not node["Alive"] for node in ray.nodes())


def documents(folder: Path, count: int) -> Path:
    """So many different texts of a few sentences."""
    folder.mkdir()
    rows = [json.loads(line) for line in SUMMARIES.read_text(encoding="utf-8").splitlines()]
    lines = []
    for number in range(count):
        row = rows[number % len(rows)]
        lines.append(
            json.dumps({"title": f"{row['title']} {number}", "text": f"{number}. {row['text'][:300]}"})
        )
    (folder / "texts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder


def test_vectors_are_those_of_this_machine_and_come_in_order(cluster: Cluster, encoder: Encoder) -> None:
    texts = [f"The {number}th metal of the list conducts heat." for number in range(21)]
    seen: list[int] = []
    found = ClusterEncoder(encoder, batch=4).encode_passages(texts, seen.append)
    assert np.abs(found - encoder.encode_passages(texts)).max() < 1e-5
    assert sorted(seen) == [1, 4, 4, 4, 4, 4]
    assert ClusterEncoder(encoder).encode_passages([]).shape == (0, encoder.dimension)


def test_a_node_that_dies_in_mid_build_costs_its_batches_and_not_the_build(
    cluster: Cluster, encoder: Encoder, tmp_path: Path
) -> None:
    source = documents(tmp_path / "texts", 96)
    undisturbed = build([source], tmp_path / "calm", encoder=ClusterEncoder(encoder, batch=4))
    victim = next(iter(cluster.worker_nodes))
    dead = nodes_dead()
    killed: list[int] = []

    def kill(progress: Progress) -> None:
        if progress.stage == "encoding" and 8 <= progress.done < progress.total and not killed:
            killed.append(progress.done)
            cluster.remove_node(victim, allow_graceful=False)

    try:
        report = build([source], tmp_path / "kb", progress=kill, encoder=ClusterEncoder(encoder, batch=4))
    finally:
        add_worker(cluster)
        while nodes_dead() == dead:  # Ray tells of it, and the next test may not be told
            time.sleep(0.5)
    assert killed
    assert report.encoded == undisturbed.encoded == 96
    assert scores_in(tmp_path / "kb") == scores_in(tmp_path / "calm")


def test_a_node_with_another_encoder_is_an_error_and_no_vector(
    cluster: Cluster, encoder: Encoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = ClusterEncoder(encoder)
    monkeypatch.setitem(there.__dict__, "fingerprint", "0" * 32)
    with pytest.raises(SpecragError, match="encoder 'minilm-l6-v2' is another one there"):
        there.encode_passages(["Copper."])


def test_the_command_encodes_on_the_cluster_and_adds_to_what_is_there(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from specrag.cli.main import run

    source = documents(tmp_path / "texts", 6)
    kb = tmp_path / "kb"
    words = ["index", str(source), "--kb", str(kb), "--json"]
    told = []
    for more in (["--encoder-dtype", "fp32", "--ray", cluster.address], ["--ray", "auto"]):
        assert run([*words, *more]) == 0
        told.append(json.loads(capsys.readouterr().out))
        (source / "more.txt").write_text("Tin is a soft metal.\n")
    assert [each["encoded"] for each in told] == [6, 1]
    with KnowledgeBase.open(kb) as base:
        assert base.manifest.encoder.dtype == "fp32"  # as it was made
        assert base.search(["Which metal is soft?"], 1)[0][0].passage.text.startswith("Tin")


def test_an_address_without_a_cluster_says_how_to_start_one(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    def nobody(**_: Any) -> None:
        raise ConnectionError("Failed to connect\nto GCS")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", nobody)
    with pytest.raises(InputError, match=r"--ray: .*ray start --head.*Failed to connect to GCS"):
        connect("10.0.0.1:1")
