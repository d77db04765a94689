"""``specrag ask`` through a server on this machine that has the model loaded, so that the command loads none."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from specrag.cli.chat import interrupts_stop
from specrag.errors import Cancelled, SpecragError
from specrag.request import Details, Result, Source, Timing, Usage
from specrag.retrieval import Passage
from specrag.serving import LOADING, RunningServer, running_servers
from specrag.speculation import Step

if TYPE_CHECKING:
    from specrag.cli.values import Chosen
    from specrag.methods import Method


def find_server(chosen: Chosen, kb: str, model: str | None) -> RunningServer | None:
    """A server that would answer as the command itself would: with the same model and the same knowledge base.

    Args:
        model: as the user named it; ``None`` for the default.
    """
    from specrag.methods import Needs

    usual = Needs.SESSIONS | Needs.GENERATOR | Needs.RETRIEVER
    if chosen.method.needs & ~usual or chosen.method.retracts or _names_something(chosen.method):
        return None
    if chosen.search.rerank is not None or chosen.generation.log_probs is not None:
        return None
    wanted = model or os.environ.get("SPECRAG_MODEL")
    loading = chosen.model.model_dump(mode="json", include=set(LOADING))
    for server in running_servers():
        is_model = server.model == wanted if wanted else server.is_default
        if is_model and dict(server.loading) == loading and server.base(kb) is not None:
            return server
    return None


def _names_something(method: Method) -> bool:
    """Whether an option names a corpus or a drafter, which a server may not have been started with."""
    from specrag.methods import describe_options

    return any(
        option["resource"] not in (None, "decoders")
        and getattr(method.options, name) not in (None, *(option["own"] or ()))
        for name, option in describe_options(method.Options).items()
    )


class _Remote(Details):
    """What the server reported of its method's result."""

    def __init__(self, told: dict[str, Any]) -> None:
        self._told = told

    def summary(self) -> dict[str, Any]:
        return {key: value for key, value in self._told.items() if key not in ("sources", "usage", "notes")}

    def notes(self) -> list[str]:
        return list(self._told.get("notes", ()))


class _Interrupted:
    """Stands in for a task: Ctrl-C closes the connection, and the server ends the text."""

    def cancel(self) -> None:
        """Raise Cancelled, which closes the connection."""
        raise Cancelled("the request was cancelled")


@dataclass(frozen=True, slots=True)
class RemoteBackend:
    """A server with everything that a command asks of it.

    Attributes:
        base: the server's name for the knowledge base.
        notes: for the user, about what was not read.
    """

    chosen: Chosen
    server: RunningServer
    base: str
    system: str | None
    notes: tuple[str, ...] = ()

    def without_abstaining(self) -> RemoteBackend:
        """The same, except that it answers whatever its passages are about."""
        # Rebuilt, since only fields that are set go to the server.
        search = type(self.chosen.search)(
            **{**self.chosen.search.model_dump(exclude_unset=True), "abstain": False, "min_score": None}
        )
        return replace(self, chosen=replace(self.chosen, search=search))

    def answer(
        self,
        question: str,
        history: tuple[Any, ...] = (),
        *,
        details: bool = False,
        stoppable: bool = False,
        **_: bool,
    ) -> Result:
        """Answer a question and show it as it comes.

        Args:
            stoppable: whether Ctrl-C ends only the answer.

        Raises:
            Cancelled: Ctrl-C ended it.
            SpecragError: the server refused, or can no longer be reached.
        """
        from specrag.cli import render

        messages = [*history, {"role": "user", "content": question}]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        with interrupts_stop(_Interrupted()) if stoppable else nullcontext():
            result = render.show(self._streaming(self._body(messages)))
        render.show_result(result, details=details, notes=self.notes)
        return result

    def _body(self, messages: list[Any]) -> dict[str, Any]:
        chosen = self.chosen
        generation = chosen.generation.model_dump(mode="json", exclude_unset=True, exclude={"timeout"})
        if "logit_bias" in generation:
            generation["logit_bias"] = {
                str(token): bias
                for token, bias in (chosen.generation.options().get("logit_bias") or {}).items()
            }
        search = chosen.search.model_dump(mode="json", exclude_unset=True)
        extension = {
            **search,
            "kb": self.base,
            "method": chosen.method.name,
            "options": chosen.method.options.model_dump(mode="json", exclude_unset=True),
            "events": True,
        }
        if chosen.generation.timeout is not None:
            extension["deadline"] = chosen.generation.timeout
        return {
            "model": self.server.name,
            "messages": messages,
            "stream": True,
            "specrag": extension,
            **generation,
        }

    def _streaming(self, body: dict[str, Any]) -> Generator[Step, None, Result]:
        text, reason = "", "stop"
        told: dict[str, Any] = {}
        for chunk in _chunks(f"{self.server.url}/v1/chat/completions", body):
            choice = chunk["choices"][0] if chunk.get("choices") else {}
            said = choice.get("delta", {}).get("content") or ""
            reason = choice.get("finish_reason") or reason
            event = chunk.get("specrag") or {}
            told = event if event.get("event") == "done" else told
            if said:
                text += said
                yield Step(tokens=(), text=said, drafted_by={}, accepted=0, seconds=0.0, finish_reason=None)
        return _result(text, reason, {key: value for key, value in told.items() if key != "event"})


def _chunks(url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream of events.

    Raises:
        SpecragError: the server refused, or was lost.
    """
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})  # noqa: S310 - http
    try:
        with urllib.request.urlopen(request) as answer:  # noqa: S310 - http
            for line in answer:
                content = line.removeprefix(b"data: ").strip()
                if line.startswith(b"data: ") and content != b"[DONE]":
                    chunk = json.loads(content)
                    if "error" in chunk:
                        raise SpecragError(f"the server at {url}: {chunk['error']['message']}")
                    yield chunk
    except urllib.error.HTTPError as error:
        raise SpecragError(f"the server at {url}: {_message(error)}") from None
    except OSError as error:
        raise SpecragError(f"the server at {url} does not answer any more: {error}; ask again") from None


def _message(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.loads(error.read())["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return str(error)


def _result(text: str, reason: str, told: dict[str, Any]) -> Result:
    usage = told.get("usage", {})
    seconds = dict(usage.get("seconds", {}))
    seconds.pop("total", None)
    timing = {name: seconds.pop(name, 0.0) for name in ("prefill", "decode", "drafting", "verifying")}
    fields = ("prompt_tokens", "cached_tokens", "completion_tokens", "passes", "relaxed")
    return Result(
        text=text,
        tokens=(),
        finish_reason="length" if reason == "length" else "stop",
        usage=Usage(
            **{name: usage.get(name, 0) for name in fields},
            drafted_by=usage.get("drafted_by", {}),
            accepted_by=usage.get("accepted_by", {}),
            exact=usage.get("exact"),
        ),
        timing=Timing(**timing, phases=seconds),
        sources=tuple(_source(source) for source in told.get("sources", ())),
        retrieved=usage.get("retrieved", 0),
        missing=tuple(usage.get("missing_shards", ())),
        details=_Remote(told),
    )


def _source(told: dict[str, Any]) -> Source:
    passage = Passage(told["number"], told["source"], told["title"], told["place"], told["text"], {})
    return Source(told["number"], passage, told["score"], told["similarity"], told["cited"], told["support"])
