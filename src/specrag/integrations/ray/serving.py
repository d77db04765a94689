"""The server as a Ray Serve application: replicas of a gateway, or of the engine, scaled by the requests that wait."""

# No `from __future__ import annotations` here: Ray reads the type of the builder's argument as it is.

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
        target_ongoing_requests: of one replica, above which another is started.
        num_cpus, num_gpus: that a replica takes of its node.
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
        """The same as options of ``serve.deployment``."""
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

    They stand as ``args`` of an application in a file of Ray Serve, or as ``NAME=VALUE`` behind ``serve run``.

    Args:
        config: a TOML file of ``specrag serve``, read where the application is built.
        settings: the same, one by one; they win over the file. Ray shows them to whoever sees its dashboard: name
            keys by ``key_file``.
        encoder, reranker: replicas that encode and that rerank for all others; by default each does it itself.
    """

    config: Path | None = None
    settings: dict[str, Any] = {}
    encoder: Replicas | None = None
    reranker: Replicas | None = None


def app(args: AppArgs) -> Application:
    """Build the application; a builder of Ray Serve.

    With ``upstreams`` among its settings its replicas are gateways, which share nothing that an answer depends on;
    else each of them loads the model. A replica takes requests once all is loaded.

    Raises:
        InputError: an argument or a setting cannot be used.
    """
    if not isinstance(args, AppArgs):
        args = _checked(args)
    values = _values(args)
    with needed_by("serve"):
        from specrag.serving.settings import load_settings

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
    """Replicas that encode or rerank for the others, one call after the other each."""
    from specrag.integrations.ray.encoders import EncoderReplica

    made = serve.deployment(EncoderReplica, name=name, **replicas.options())
    return made.bind()


class _Replica:
    """What Ray asks of a replica beside its answers.

    Args:
        deployments: that it calls; they belong to its application by being named here.
    """

    app: "FastAPI"

    def __init__(self, *deployments: Any) -> None:
        self._deployments = deployments

    def check_health(self) -> None:
        """Raise where only a restart helps; endpoints that do not answer are none of these cases."""
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
    """The settings as every replica gets them; what they say of files holds on each node."""
    with needed_by("serve"):
        from specrag.serving.settings import read_toml

    written = {} if args.config is None else read_toml(args.config)
    return {"log_level": "warning", **written, **args.settings}


def _builder(values: dict[str, Any], deployments: list[str]) -> "Callable[[], FastAPI]":
    """Makes the server's application on a replica.

    Args:
        deployments: that encode or rerank.
    """

    def build() -> "FastAPI":
        from specrag.serving.app import create_app
        from specrag.serving.settings import load_settings

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
