"""The server on Ray Serve: gateways in front of replicas of the own engine, on a real cluster."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest

pytest.importorskip("ray")

from ray import serve

from benchmarks.gateway.clients import alone, ask_until, mixed_questions
from specrag.errors import InputError
from specrag.integrations.ray import AppArgs, Replicas, app
from specrag.models import catalog
from specrag.retrieval.encoder.encoder import load_encoder
from specrag.retrieval.encoder.reranker import load_reranker
from specrag.retrieval.knowledge_base import KnowledgeBase
from tests.retrieval.encoder.tiny_networks import write_cross_encoder
from tests.sample import build_sample

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

pytestmark = pytest.mark.filterwarnings("default")  # Ray warns of itself

MODEL = "smollm2-135m"
CHAT = "/v1/chat/completions"


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


@pytest.fixture(scope="module")
def kb(tmp_path_factory: pytest.TempPathFactory, model_home: Path) -> Path:
    return build_sample(tmp_path_factory.mktemp("ray") / "kb")


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory, model_home: Path) -> Path:
    return write_cross_encoder(tmp_path_factory.mktemp("reranker"), catalog.resolve("minilm-l6-v2").folder)


@pytest.fixture(scope="module")
def address(cluster: Cluster, smollm2: Path, kb: Path, reranker: Path) -> Iterator[str]:
    """Give the address of two gateways in front of two engines, with encoders and rerankers of their own."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    two: dict[str, Any] = {"min_replicas": 2, "max_replicas": 2, "num_cpus": 0.1}
    engine = {"model": MODEL, "dtype": "int8", "batch_invariant": True, "page": False}
    upstream = {"name": "small", "urls": [f"{url}/engine/v1"] * 2, "tokenizer": MODEL}
    ranks = str(reranker)
    gateway = {"upstreams": [upstream], "kbs": {"wiki": str(kb)}, "reranker": ranks, "page": False}
    beside = {name: Replicas(**two) for name in ("encoder", "reranker")}
    serve.start(http_options={"port": port})
    serve.run(app(AppArgs(settings=engine, **two)), name="engine", route_prefix="/engine")
    serve.run(app(AppArgs(settings=gateway, **beside, **two)), name="gateway", route_prefix="/")
    yield url
    serve.shutdown()


def asked(question: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}]
    return {"model": "small", "messages": messages, "max_tokens": 8, "temperature": 0, **more}


def ask(address: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{address}{CHAT}", json=body, timeout=120)


def test_a_chat_is_answered_as_by_the_engine_behind_the_gateway(address: str) -> None:
    body = asked("What is copper?")
    through = ask(address, body)
    assert through.status_code == 200, through.text
    direct = httpx.post(f"{address}/engine{CHAT}", json={**body, "model": MODEL}, timeout=120)
    assert through.json()["choices"] == direct.json()["choices"]


def test_an_answer_from_a_knowledge_base_is_streamed(address: str) -> None:
    body = {**asked("Who discovered radium?"), "model": "small@wiki", "stream": True}
    with httpx.stream("POST", f"{address}{CHAT}", json=body, timeout=120) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert len(lines) > 5


@pytest.mark.parametrize("method", ["sequential", "ralmspec"])
def test_iterative_retrieval_runs_through_it(method: str, address: str) -> None:
    extension = {"kb": "wiki", "method": method, "options": {"passage_tokens": 32}}
    answer = ask(address, asked("Who discovered radium?", specrag=extension)).json()
    assert answer["specrag"]["retrievals"] == 2


# -- encoders and rerankers -------------------------------------------------------------------------------------

TEXTS = ["Radium was discovered by Marie Curie.", "Tea is a drink."]


def test_vectors_are_those_of_an_encoder_here(address: str) -> None:
    body = {"model": "minilm-l6-v2", "input": TEXTS}
    told = httpx.post(f"{address}/v1/embeddings", json=body, timeout=120).json()
    found = np.array([each["embedding"] for each in told["data"]], dtype=np.float32)
    assert np.array_equal(found, load_encoder().encode_passages(TEXTS))


@pytest.mark.parametrize("rerank", [False, True])
def test_a_search_finds_and_orders_as_one_here(rerank: bool, address: str, kb: Path, reranker: Path) -> None:
    question = "Who discovered radium?"
    body = {"query": question, "k": 3, **({"rerank": str(reranker)} if rerank else {})}
    told = httpx.post(f"{address}/v1/kb/wiki/search", json=body, timeout=120).json()
    with KnowledgeBase.open(kb) as base:
        ranks = load_reranker(str(reranker)) if rerank else None
        (hits,) = base.search([question], 3, reranker=ranks)
    assert [(each["id"], each["score"]) for each in told["data"]] == [
        (hit.passage.id, hit.score) for hit in hits
    ]


def test_a_gateway_loads_no_encoder(address: str) -> None:
    """The weights are where the deployment's replicas are, and only there."""
    import ray

    counts = {
        name: ray.get(ray.get_actor(name, namespace="serve").__ray_call__.remote(lambda _: networks_here()))
        for name in actors("gateway")
    }
    by_kind: dict[str, set[int]] = {}
    for name, count in counts.items():
        by_kind.setdefault(name.split("#")[1], set()).add(count)
    assert by_kind["specrag"] == {0}
    assert max(by_kind["encoder"]) == 1


def networks_here() -> int:
    """Encoders whose weights are in this process."""
    import gc

    from specrag.retrieval.encoder.bert import Bert

    gc.unfreeze()  # what a server has loaded when it starts is not looked at otherwise
    return sum(isinstance(each, Bert) for each in gc.get_objects())


def test_an_encoder_that_is_killed_in_the_middle_is_asked_again(address: str) -> None:
    body = {"model": "minilm-l6-v2", "input": [f"{TEXTS[0]} {number}" for number in range(600)]}
    expected = load_encoder().encode_passages(body["input"][:64])
    told: list[httpx.Response] = []
    asking = threading.Thread(
        target=lambda: told.append(httpx.post(f"{address}/v1/embeddings", json=body, timeout=120))
    )
    asking.start()
    for name in actors("gateway#encoder"):
        time.sleep(0.5)
        kill(name)
    asking.join()
    assert told[0].status_code == 200, told[0].text
    found = np.array([each["embedding"] for each in told[0].json()["data"]], dtype=np.float32)
    assert np.array_equal(found[:64], expected)


# -- kills ------------------------------------------------------------------------------------------------------


def test_no_answer_is_wrong_lost_or_late_while_engines_are_killed(address: str) -> None:
    """Clients of mixed methods, and now and then an engine's process that is killed and started again."""
    questions = alone(address, mixed_questions("small", "wiki")[:5])  # one of each method
    over = threading.Event()
    said: list[str] = []

    def kill() -> None:
        for _ in range(2):
            over.wait(3)
            kill_an_engine()
        over.wait(8)
        over.set()

    killer = threading.Thread(target=kill)
    killer.start()
    counted = ask_until(
        over, address, questions, 6, tell=lambda _, outcome, text: said.append(f"{outcome}: {text}")
    )
    killer.join()
    assert counted["right"] > 2
    assert not counted.keys() & {"wrong", "lost", "late"}, said
    assert alone(address, questions[:1]) == questions[:1]


def kill_an_engine() -> None:
    """End the process of a replica without a farewell; Ray starts another."""
    kill(random.choice(actors("engine#")))


def actors(prefix: str) -> list[str]:
    """Names of Serve's replicas, whose application and deployment begin so."""
    import ray

    names = [each["name"] for each in ray.util.list_named_actors(all_namespaces=True)]
    return [name for name in names if name.startswith(f"SERVE_REPLICA::{prefix}")]


def kill(name: str) -> None:
    import ray

    ray.kill(ray.get_actor(name, namespace="serve"))


# -- arguments --------------------------------------------------------------------------------------------------


def test_words_of_a_command_line_become_numbers_and_the_file_is_read_where_it_is_built(
    tmp_path: Path,
) -> None:
    file = tmp_path / "gateway.toml"
    file.write_text('[[upstreams]]\nname = "small"\nurls = ["http://host/v1"]\n')
    built = app({"config": str(file), "max_replicas": "3", "num_cpus": "0.5"})  # type: ignore[arg-type]
    deployment = built._bound_deployment
    assert deployment.name == "specrag"
    assert deployment._deployment_config.autoscaling_config.max_replicas == 3
    assert deployment.ray_actor_options["num_cpus"] == 0.5


@pytest.mark.parametrize(
    ("values", "field", "said"),
    [
        ({"replicas": 2}, "replicas", "Extra inputs"),
        ({"min_replicas": 4}, "args", "max_replicas is less than min_replicas"),
        ({"settings": {"upstreams": ["small"]}}, "upstreams", "give NAME=URL"),
        ({"settings": {"no_such": 1}}, "no_such", "Extra inputs"),
        ({"config": "/nowhere/at-all.toml"}, "config", "give a TOML file"),
    ],
)
def test_an_argument_that_cannot_be_used_is_refused_by_name(
    values: dict[str, Any], field: str, said: str
) -> None:
    with pytest.raises(InputError, match=said) as told:
        app(values)  # type: ignore[arg-type]
    assert field in told.value.field
