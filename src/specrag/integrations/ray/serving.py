"""The server as a Ray Serve application: replicas of a gateway or of the engine, scaled by ongoing requests."""

# No `from __future__ import annotations` here: Ray needs the type of the builder's argument, not a string.

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from specrag.errors import InputError, SpecragError
from specrag.extras import needed_by

with needed_by("ray"):
    from ray import serve
    from ray.serve import Application

if TYPE_CHECKING:
    from fastapi import FastAPI


class Replicas(BaseModel):
    """Replicas of a deployment.

    Args:
        min_replicas, max_replicas: how many there are.
        target_ongoing_requests: requests of one replica above which another is started.
        num_cpus, num_gpus: what a replica takes of its node.
    """

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), hide_input_in_errors=True)

    min_replicas: Annotated[int, Field(ge=1)] = 1
    max_replicas: Annotated[int, Field(ge=1)] = 1
    target_ongoing_requests: Annotated[float, Field(gt=0)] = 16
    num_cpus: Annotated[float, Field(ge=0)] = 1
    num_gpus: Annotated[float, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _check(self) -> "Replicas":
        if self.max_replicas < self.min_replicas:
            raise ValueError(f"max_replicas is less than min_replicas ({self.min_replicas}); raise it")
        return self

    def options(self) -> dict[str, Any]:
        """The options for ``serve.deployment``."""
        return {
            "autoscaling_config": {
                "min_replicas": self.min_replicas,
                "max_replicas": self.max_replicas,
                "target_ongoing_requests": self.target_ongoing_requests,
            },
            "ray_actor_options": {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus},
        }


class AppArgs(Replicas):
    """Arguments of :func:`app`.

    They are the ``args`` of an application in a Ray Serve file, or follow ``serve run`` as ``NAME=VALUE``.

    Args:
        config: a TOML file of ``specrag serve``, read where the application is built.
        settings: single settings, which override the file. Anyone with access to Ray's dashboard can see them: give
            keys by ``key_file``.
        encoder, reranker: replicas that encode or rerank for all others; by default each replica does so itself.
    """

    config: Path | None = None
    settings: dict[str, Any] = {}
    encoder: Replicas | None = None
    reranker: Replicas | None = None


def app(args: AppArgs) -> Application:
    """Build the application; an application builder for Ray Serve.

    With ``upstreams`` among the settings, its replicas are gateways, which share nothing that an answer depends on;
    otherwise each of them loads the model. A replica takes requests once everything is loaded.

    Raises:
        InputError: an argument or a setting cannot be used.
    """
    if not isinstance(args, AppArgs):
        args = _checked(args)
    values = _values(args)
    with needed_by("serve"):
        from specrag.serving import load_settings

    settings = load_settings(None, values)
    others = {name: replicas for name in ("encoder", "reranker") if (replicas := getattr(args, name))}
    deployment = serve.deployment(
        serve.ingress(_builder(values, list(others)))(_Replica),
        name="specrag",
        max_ongoing_requests=settings.max_concurrent + settings.max_queue,
        graceful_shutdown_timeout_s=settings.shutdown_seconds,
        **args.options(),
    )
    return deployment.bind(*(_beside(name, replicas) for name, replicas in others.items()))


def _beside(name: str, replicas: Replicas) -> Application:
    """Replicas that encode or rerank for the others, each one call after the other."""
    from specrag.integrations.ray.encoders import EncoderReplica

    made = serve.deployment(EncoderReplica, name=name, **replicas.options())
    return made.bind()


class _Replica:
    """What Ray requires of a replica besides its answers.

    Args:
        deployments: the deployments that it calls; naming them here makes them part of its application.
    """

    app: "FastAPI"

    def __init__(self, *deployments: Any) -> None:
        self._deployments = deployments

    def check_health(self) -> None:
        """Raise if only a restart helps; endpoints that do not answer are not such a case."""
        service = self.app.state.service
        if service.state == "failed":
            raise SpecragError(f"the replica cannot answer: {service.failure}")


def _checked(values: Any) -> AppArgs:
    try:
        return AppArgs.model_validate(values)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in problem["loc"]) or "args"
        raise InputError(field, "the value given", problem["msg"].removeprefix("Value error, ")) from None


def _values(args: AppArgs) -> dict[str, Any]:
    """The settings as every replica gets them; file paths in them apply on each node."""
    with needed_by("serve"):
        from specrag.serving import read_toml

    written = {} if args.config is None else read_toml(args.config)
    return {"log_level": "warning", **written, **args.settings}


def _builder(values: dict[str, Any], deployments: list[str]) -> "Callable[[], FastAPI]":
    """Returns a function that makes the server's application on a replica.

    Args:
        deployments: the deployments that encode or rerank.
    """

    def build() -> "FastAPI":
        from specrag.serving import create_app, load_settings

        encoders = None
        if deployments:
            from specrag.integrations.ray.encoders import DeployedEncoders

            encoders = DeployedEncoders(deployments)
        made = create_app(load_settings(None, values), encoders)
        begin = made.router.lifespan_context

        @asynccontextmanager
        async def loaded(app: "FastAPI") -> AsyncIterator[None]:
            async with begin(app):
                while app.state.service.state == "loading":
                    await asyncio.sleep(0.05)
                if app.state.service.failure is not None:
                    raise app.state.service.failure
                yield

        made.router.lifespan_context = loaded
        return made

    return build
