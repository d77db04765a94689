"""The way of a request for texts, from its body to its answer: the same on every route that writes them."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from specrag.serving.openai.answering import Answering, WritesAnswer, respond, service_of
from specrag.serving.openai.planning import Job, Planner, prepare, with_named_base
from specrag.serving.openai.relay import is_relayed, relay
from specrag.serving.openai.schemas import ChatCompletionRequest, CompletionRequest, ResponseRequest

B = TypeVar("B", ChatCompletionRequest, CompletionRequest, ResponseRequest)
J = TypeVar("J", bound=Job)


async def answer(
    request: Request,
    body: B,
    prompt_field: str,
    plan: Callable[[B, Planner], J],
    form: Callable[[B, J, Answering], WritesAnswer],
) -> Response:
    """Plan the texts of a request and write them, or let an upstream do both.

    Args:
        prompt_field: the field of the body that holds the prompt.
        plan: checks everything and tokenizes; runs outside the event loop.
        form: puts the texts into the route's form.
    """
    arrived = time.perf_counter()
    service = service_of(request)
    body = await with_named_base(body, service, request.state.key)
    planner = Planner(service, request.state.key, prompt_field, service.served(body.model))
    if not isinstance(body, ResponseRequest) and is_relayed(body, planner):
        return await relay(request, body, planner, arrived)
    job = await prepare(request, service, partial(plan, body, planner), arrived, body.extension.deadline)
    answering = Answering(planner, body, job, arrived)
    return await respond(request, answering, form(body, job, answering), stream=bool(body.stream))
