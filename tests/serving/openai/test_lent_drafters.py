"""What a server lends: corpora to copy from, draft models and heads to ask, and who may use them; its log."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from specrag.errors import InputError
from specrag.models.tokenizer import Tokenizer
from specrag.serving.operation.logs import Log
from specrag.serving.settings import load_settings
from specrag.speculation.suffix.corpus import build_corpus
from tests.serving.live_server import MODEL, LiveServer, running_server

READER, STRANGER = "reader-key-0123456789", "stranger-key-0123456"
TEXT = "The lighthouse of Lindau is thirty-three metres high, and its keeper counts the ships every evening."
PROMPT = f"Repeat this sentence three times. {TEXT}\n\n{TEXT} The lighthouse of"
HEAD = "eagle:smollm2-135m"


@pytest.fixture(scope="module")
def lending(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Give a server with a corpus, a head, and two keys, one of which may read the corpus."""
    from specrag.models.catalog import resolve

    tokenizer = Tokenizer(resolve(MODEL))
    folder = tmp_path_factory.mktemp("served") / "corpus"
    text = np.array(tokenizer.encode("Ships pass. " + TEXT.replace("The", "Then the"), special=False))
    build_corpus([text], folder, tokenizer=tokenizer.fingerprint)
    keys = [
        {"name": "reader", "key": READER, "kbs": ["ships"]},
        {"name": "stranger", "key": STRANGER, "kbs": []},
    ]
    with running_server(corpora={"ships": folder}, drafters=(HEAD,), keys=keys) as server:
        yield server


def ask(server: LiveServer, key: str = READER, prompt: str = PROMPT, **options: Any) -> httpx.Response:
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": 24,
        "temperature": 0,
        "specrag": {"method": "adaptive" if options else "plain", "options": options},
    }
    return httpx.post(
        f"{server.url}/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"}, timeout=120
    )


def test_a_corpus_and_a_head_guess_and_change_no_token(lending: LiveServer) -> None:
    prompt = "Then the lighthouse of Lindau is"
    plain = ask(lending, prompt=prompt).json()["choices"][0]["text"]
    copied, guessed = ask(lending, prompt=prompt, corpus="ships"), ask(lending, prompt=prompt, drafter=HEAD)
    for answer in (copied, guessed):
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["text"] == plain
    assert copied.json()["specrag"]["usage"]["drafted_by"].get("corpus", 0) > 0
    assert guessed.json()["specrag"]["usage"]["drafted_by"].get("eagle", 0) > 0


def test_only_what_is_lent_can_be_named_and_only_by_those_who_may(lending: LiveServer) -> None:
    for key, options, named in (
        (STRANGER, {"corpus": "ships"}, "there is none here"),
        (READER, {"corpus": "sheep"}, "take one of ships"),
        (READER, {"drafter": "model:smollm2-135m"}, "recycling, lookup, none, eagle:smollm2-135m"),
        (READER, {"drafter": "/etc/passwd"}, "take one of"),
    ):
        answer = ask(lending, key, **options)
        assert answer.status_code == 400, answer.text
        assert named in answer.json()["error"]["message"]


def test_the_table_of_methods_names_what_a_key_may_use(lending: LiveServer) -> None:
    described = {}
    for key in (READER, STRANGER):
        found = httpx.get(f"{lending.url}/v1/specrag/methods", headers={"Authorization": f"Bearer {key}"})
        described[key] = next(method for method in found.json() if method["name"] == "adaptive")["options"]
    assert described[READER]["corpus"]["choices"] == {"": "none", "ships": "ships"}
    assert "corpus" not in described[STRANGER]
    assert described[STRANGER]["drafter"]["choices"] == ["recycling", "lookup", "none", HEAD]


def test_a_method_whose_drafter_is_lent_is_served(lending: LiveServer) -> None:
    found = httpx.get(
        f"{lending.url}/v1/specrag/methods", headers={"Authorization": f"Bearer {READER}"}
    ).json()
    methods = {method["name"]: method["options"] for method in found}
    assert methods["eagle-2"]["drafter"]["choices"] == [HEAD]
    assert "draft-model" not in methods  # a head is no model
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    texts = []
    for specrag in ({"method": "plain"}, {"method": "eagle-2", "options": {"drafter": HEAD}}):
        answer = httpx.post(
            f"{lending.url}/v1/completions",
            json={**body, "specrag": specrag},
            headers={"Authorization": f"Bearer {READER}"},
            timeout=120,
        )
        assert answer.status_code == 200, answer.text
        texts.append(answer.json()["choices"][0]["text"])
    assert texts[0] == texts[1]
    assert answer.json()["specrag"]["usage"]["accepted_by"].get("eagle", 0) > 0


def test_names_are_given_once_and_drafters_exist(tmp_path: Path) -> None:
    same = {"datastores": {"a": tmp_path}, "corpora": {"a": tmp_path}}
    with pytest.raises(InputError, match="something else has the same name"):
        load_settings(None, same)


@pytest.mark.parametrize("texts", [True, False])
def test_the_log_holds_prompt_and_answer_where_it_may(
    lending: LiveServer, monkeypatch: pytest.MonkeyPatch, texts: bool
) -> None:
    """Both end with a line of figures; the operator's setting alone decides about texts."""
    operation: Any = lending.service.observers[0].__self__  # type: ignore[attr-defined]
    written = io.StringIO()
    settings = lending.service.settings.model_copy(
        update={"log_prompts": texts, "log_level": "info", "log_format": "json"}
    )
    monkeypatch.setattr(lending.service, "settings", settings)
    monkeypatch.setattr(operation, "log", Log(settings, written))
    chat = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Say the word heron."}],
        "max_tokens": 8,
        "temperature": 0,
    }
    headers = {"Authorization": f"Bearer {READER}"}
    answered = httpx.post(f"{lending.url}/v1/chat/completions", json=chat, headers=headers, timeout=60).json()
    lending.wait_until_idle()
    (line,) = [json.loads(each) for each in written.getvalue().splitlines()]
    assert line["completion_tokens"] == 8
    if texts:
        assert "Say the word heron." in line["prompt"]
        assert line["answer"] == answered["choices"][0]["message"]["content"]
    else:
        assert "heron" not in written.getvalue()
        assert not {"prompt", "answer"} & line.keys()
