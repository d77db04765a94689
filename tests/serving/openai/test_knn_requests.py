"""kNN-LM over HTTP: datastores by name, the tokens of the library, and keys that see no other's datastore."""

from __future__ import annotations

import gc
import os
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from specrag.methods.knn_lm.mixture import Mixture
from specrag.methods.knn_lm.store.datastore import Datastore
from tests.methods.knn_toys import knn as knn_decoder
from tests.methods.test_knn_real import PROMPTS
from tests.sample import build_village
from tests.serving.live_server import EXACT, MODEL, LiveServer, running_server

READER, STRANGER = "reader-key-0123456789", "stranger-key-0123456"
OPTIONS: dict[str, Any] = {"k": 64, "weight": 0.6, "knn_temperature": 5.0, "knn_reach": 500.0}


@pytest.fixture(scope="module")
def knn(village: Path) -> Iterator[LiveServer]:
    """Give a server with a datastore and two keys, one of which may search it."""
    keys = [
        {"name": "reader", "key": READER, "kbs": ["village"]},
        {"name": "stranger", "key": STRANGER, "kbs": []},
    ]
    with running_server(datastores={"village": village}, keys=keys) as server:
        yield server


def ask(server: LiveServer, key: str = READER, **options: Any) -> httpx.Response:
    body = {
        "model": MODEL,
        "prompt": PROMPTS[0],
        "max_tokens": 12,
        "temperature": 0,
        "specrag": {"method": "knn-lm", "options": {**OPTIONS, **options}},
    }
    return httpx.post(
        f"{server.url}/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"}, timeout=120
    )


def test_tokens_are_the_librarys_and_speculation_changes_none(knn: LiveServer) -> None:
    answers = [ask(knn), ask(knn, stride="sequential"), ask(knn, stride=4, asynchronous=True)]
    assert [answer.status_code for answer in answers] == [200] * 3, answers[0].text
    texts = [answer.json()["choices"][0]["text"] for answer in answers]
    store = knn.service.datastores_of(lambda _: True)["village"]
    method = knn_decoder(store, Mixture(64, 0.6, 5.0, 500.0), stride="sequential")
    expected = knn.service.llm.generate(PROMPTS[0], raw=True, max_tokens=12, method=method)
    plain = knn.service.llm.generate(PROMPTS[0], raw=True, max_tokens=12)
    assert texts == [expected.text] * 3
    assert expected.text != plain.text, "the neighbours changed nothing, so that the test shows nothing"
    guessed, alone = answers[2].json()["specrag"]["usage"], answers[1].json()["specrag"]["usage"]
    assert guessed["accepted"] > 0
    assert alone["drafted"] == 0


def test_a_datastore_is_known_to_those_who_may_read_it(knn: LiveServer) -> None:
    described: dict[str, Any] = {}
    for key in (READER, STRANGER):
        answer = httpx.get(f"{knn.url}/v1/specrag/methods", headers={"Authorization": f"Bearer {key}"})
        described[key] = {method["name"]: method for method in answer.json()}
    field = described[READER]["knn-lm"]["options"]["datastore"]
    assert (field["type"], field["choices"], field["default"]) == ("choice", ["village"], "village")
    assert "knn-lm" not in described[STRANGER]
    refused = ask(knn, STRANGER, datastore="village")
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "specrag.options.datastore"
    assert "village" not in refused.json()["error"]["message"].replace("'village'", "", 1)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"datastore": "town"}, "take one of village"),
        ({"k": 1024}, "k"),
        ({"k": 0}, "specrag.options.k"),
        ({"weight": 1.5}, "specrag.options.weight"),
        ({"index": "hnsw"}, "hnsw"),
        ({"stride": "often"}, "specrag.options.stride"),
        ({"stride": "sequential", "asynchronous": True}, "specrag.options.asynchronous"),
        ({"stride": "sequential", "decoder": "respec"}, "specrag.options.decoder"),
    ],
)
def test_what_cannot_be_searched_is_refused(knn: LiveServer, options: dict[str, Any], says: str) -> None:
    answer = ask(knn, **options)
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_a_server_that_has_stopped_lets_its_datastores_go(village: Path) -> None:
    """Nothing that requests share keeps them: neither the object, which maps the keys, nor the lock on its folder."""
    before = opened(village)  # of other servers
    with running_server(datastores={"village": village}) as server:
        assert ask(server).status_code == 200
        store = weakref.ref(server.service.datastores_of(lambda _: True)["village"])
        assert opened(village) > before
    gc.collect()
    assert store() is None
    assert opened(village) == before


def opened(folder: Path) -> int:
    """How many files of a folder this process has open or mapped."""
    links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if os.path.lexists(path)]
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return sum(str(folder) in line for line in [*links, *maps])


def test_a_datastore_of_another_precision_is_refused_at_the_start(smollm2: Path, tmp_path: Path) -> None:
    from specrag.errors import SpecragError
    from specrag.serving.service import Service
    from specrag.serving.settings import load_settings

    folder = build_village(tmp_path / "store", MODEL, dtype="bf16")
    service = Service(load_settings(None, {**EXACT, "datastores": {"village": folder}}))
    with pytest.raises(SpecragError, match="int8"):
        service.load()
    with Datastore.open(folder) as store:  # it is as it was
        assert len(store) > 0
