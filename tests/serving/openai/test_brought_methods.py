"""A method of another package is served like our own: in table, OpenAPI schema, answers, streams and figures."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from specrag.extras import brought
from tests.serving.live_server import MODEL, LiveServer, post, running_server

PARROT = """
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from specrag.engine.passes import Emit
from specrag.errors import InputError
from specrag.methods.base import Method, MethodOptions, Needs, Plan
from specrag.request import Details, Event, Result, Timing, Usage


@dataclass(frozen=True)
class Squawk(Event):
    text: str
    name = "squawk"

    @property
    def text_gained(self) -> str:
        return self.text

    def describe(self) -> dict[str, Any]:
        return {"letters": len(self.text)}


class Feathers(Details):
    def summary(self) -> dict[str, Any]:
        return {"colour": "green"}


class Parrot(Method):
    name = "parrot"
    summary = "Says what it heard"
    needs = Needs.NOTHING

    class Options(MethodOptions):
        times: Annotated[int, Field(ge=1, le=3)] = Field(2, title="n", description="How often.")
        mood: Literal["calm", "loud"] = Field("calm", description="Of the parrot.")
        words: tuple[str, ...] = Field((), description="That it says first.")

    def plan(self, request, given):
        if not request.question.strip(".!? "):
            raise InputError("times", self.options.times, "say something first")
        said = [*self.options.words, *[request.question] * self.options.times]
        said = [text.upper() for text in said] if self.options.mood == "loud" else said

        def begin():
            for text in said:
                yield Emit(Squawk(text))
            return Result("".join(said), (), "stop", Usage(3, 0, 7, 0, {}, {}), Timing(0.0, 0.0), details=Feathers())

        return Plan(begin, 1)
"""


@pytest.fixture(scope="module")
def parrots(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Give a server where a package with a method is installed, and one whose method cannot be imported."""
    folder = tmp_path_factory.mktemp("installed")
    (folder / "parrots.py").write_text(PARROT, encoding="utf-8")
    about = folder / "parrots-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: parrots\nVersion: 1.0\n", encoding="utf-8")
    entries = "[specrag.methods]\nparrot = parrots:Parrot\nbroken = parrots_that_are_not_there:Method\n"
    (about / "entry_points.txt").write_text(entries, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        brought.cache_clear()
        with running_server() as server:
            yield server
    brought.cache_clear()


def body(text: str = "hello", stream: bool = False, **specrag: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {
        "model": MODEL,
        "messages": messages,
        "stream": stream,
        "specrag": {"method": "parrot", **specrag},
    }


def test_it_is_listed_with_its_options(parrots: LiveServer) -> None:
    methods = {method["name"]: method for method in httpx.get(f"{parrots.url}/v1/specrag/methods").json()}
    assert "broken" not in methods
    described = methods["parrot"]
    assert (described["title"], described["needs_kb"]) == ("Says what it heard", False)
    assert described["options"]["times"] == {
        "type": "integer",
        "default": 2,
        "min": 1,
        "max": 3,
        "choices": None,
        "help": "How often.",
        "symbol": "n",
    }
    assert described["options"]["mood"]["choices"] == ["calm", "loud"]
    assert described["options"]["words"]["type"] == "array"


def counted(parrots: LiveServer) -> float:
    """How many of its texts have ended."""
    found = re.search(
        r'^specrag_generations_total\{method="parrot",reason="stop"\} (\S+)',
        httpx.get(f"{parrots.url}/metrics").text,
        flags=re.M,
    )
    return float(found[1]) if found else 0.0


def test_it_answers_and_is_counted(parrots: LiveServer) -> None:
    before = counted(parrots)
    answer = post(parrots, "/v1/chat/completions", body(options={"mood": "loud", "words": ["oh "]})).json()
    assert answer["choices"][0]["message"]["content"] == "OH HELLOHELLO"
    assert answer["usage"]["completion_tokens"] == 7
    assert (answer["specrag"]["method"], answer["specrag"]["colour"]) == ("parrot", "green")
    assert answer["specrag"]["usage"]["tokens_per_second"] is None
    assert counted(parrots) == before + 1
    completed = post(
        parrots,
        "/v1/completions",
        {"model": MODEL, "prompt": "ho", "specrag": {"method": "parrot"}},
    )
    assert completed.json()["choices"][0]["text"] == "hoho"


def test_its_events_are_streamed(parrots: LiveServer) -> None:
    answer = post(parrots, "/v1/chat/completions", body(stream=True, events=True))
    chunks = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "hellohello"
    told = [chunk["specrag"] for chunk in chunks if "specrag" in chunk]
    assert [(event["event"], event.get("letters")) for event in told] == [
        ("squawk", 5),
        ("squawk", 5),
        ("done", None),
    ]
    assert told[-1]["colour"] == "green"


@pytest.mark.parametrize(
    ("text", "specrag", "param", "says"),
    [
        ("hello", {"options": {"times": 4}}, "specrag.options.times", "a whole number from 1 to 3"),
        ("hello", {"options": {"tims": 1}}, "specrag.options.tims", "did you mean times?"),
        ("...", {}, "specrag.options.times", "say something first"),
        ("hello", {"method": "parot"}, "specrag.method", "did you mean parrot?"),
    ],
)
def test_what_it_refuses_is_named(
    parrots: LiveServer, text: str, specrag: dict[str, Any], param: str, says: str
) -> None:
    error = post(parrots, "/v1/chat/completions", body(text, **specrag)).json()["error"]
    assert error["param"] == param
    assert says in error["message"]


def test_the_schema_takes_of_each_method_its_own_options(parrots: LiveServer) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    whole = httpx.get(f"{parrots.url}/openapi.json").json()
    schema = {"$ref": "#/components/schemas/SpecragField", "components": whole["components"]}
    validator = jsonschema.Draft202012Validator(schema)
    for good in (
        {},
        {"method": None, "options": {"tolerance": 2.0}},
        {"method": "parrot", "options": {"times": 3, "words": ["a"]}},
        {"method": "ralmspec", "kb": "wiki", "options": {"stride": "os3", "interval": 8}},
        {"method": "ralmspec", "kb": "wiki", "options": {"stride": 3}},
        {"method": "speculative-rag", "k": 5, "options": {"without": ["draft"]}},
        {"method": "standard-rag", "where": ["year>=2000"], "events": True},
    ):
        validator.validate(good)
    for bad in (
        {"options": {"times": 1}},
        {"method": "parrot", "options": {"times": 4}},
        {"method": "parrot", "options": {"tolerance": 2.0}},
        {"method": "plain", "options": {"times": 1}},
        {"method": "ralmspec", "options": {"stride": "often"}},
        {"method": "rapid", "options": {"keep_prefix": "/tmp"}},
        {"method": "knn-lm"},  # this server has no datastore
        {"method": "nothing"},
        {"k": 0},
        {"rerank": "any"},
    ):
        assert not validator.is_valid(bad), bad


def test_every_described_schema_is_one(parrots: LiveServer) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    components = httpx.get(f"{parrots.url}/openapi.json").json()["components"]["schemas"]
    assert {f"{name}.Options" for name in ("parrot", "adaptive", "speculative-rag")} <= components.keys()
    for name, schema in components.items():
        jsonschema.Draft202012Validator.check_schema(schema)
        text = json.dumps(schema)
        for place in text.split('"$ref": "#/components/schemas/')[1:]:
            assert place.split('"')[0] in components, name
