"""The server on Ray Serve: gateways in front of replicas of the own engine, on a real cluster."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

pytest.importorskip("ray")

from ray import serve

from benchmarks.gateway.clients import alone, ask_until, mixed_questions
from specrag.errors import InputError
from specrag.integrations.ray import AppArgs, app
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
def address(cluster: Cluster, smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Give the address of two gateways in front of two engines."""
    kb = build_sample(tmp_path_factory.mktemp("ray") / "kb")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    two: dict[str, Any] = {"min_replicas": 2, "max_replicas": 2, "num_cpus": 0.1}
    engine = {"model": MODEL, "dtype": "int8", "batch_invariant": True, "page": False}
    upstream = {"name": "small", "urls": [f"{url}/engine/v1"] * 2, "tokenizer": MODEL}
    gateway = {"upstreams": [upstream], "kbs": {"wiki": str(kb)}, "page": False}
    serve.start(http_options={"port": port})
    serve.run(app(AppArgs(settings=engine, **two)), name="engine", route_prefix="/engine")
    serve.run(app(AppArgs(settings=gateway, **two)), name="gateway", route_prefix="/")
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
    wish = {"kb": "wiki", "method": method, "options": {"passage_tokens": 32}}
    answer = ask(address, asked("Who discovered radium?", specrag=wish)).json()
    assert answer["specrag"]["retrievals"] == 2


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
    import ray

    names = [each["name"] for each in ray.util.list_named_actors(all_namespaces=True)]
    name = random.choice([name for name in names if name.startswith("SERVE_REPLICA::engine#")])
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
