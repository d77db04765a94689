"""Encoders and rerankers as separate Ray Serve deployments, which gateways call instead of loading the models."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from specrag.errors import SpecragError, UpstreamError
from specrag.extras import needed_by
from specrag.models.catalog import ModelFiles
from specrag.retrieval.encoder import (
    Encoder,
    Encoders,
    EncoderSettings,
    Reranker,
    checked_reranker,
    find_encoder,
)

with needed_by("ray"):
    from ray import serve
    from ray.exceptions import RayError, RayTaskError
    from ray.serve.exceptions import RayServeException

#: Tries of a call: it has no effect but its result, so it is repeated if a replica dies.
_TRIES = 3

#: Seconds for a call, including the loading of a model before it.
_SECONDS = 120.0


class EncoderReplica:
    """A replica's work: vectors and scores from models that it loads when they are first needed."""

    def __init__(self) -> None:
        self._encoders = Encoders()

    def describe(self, name: str, dtype: str) -> tuple[str, int]:
        """Fingerprint and dimension of an encoder."""
        encoder = self._encoders.encoder(name, dtype)
        return encoder.fingerprint, encoder.dimension

    def encode_queries(self, name: str, dtype: str, texts: list[str]) -> np.ndarray:
        """See :meth:`~specrag.retrieval.encoder.encoder.Encoder.encode_queries`."""
        return self._encoders.encoder(name, dtype).encode_queries(texts)

    def encode(self, name: str, dtype: str, texts: list[str], prompt: str) -> np.ndarray:
        """See :meth:`~specrag.retrieval.encoder.encoder.Network.encode`."""
        return self._encoders.encoder(name, dtype).network.encode(texts, prompt)

    def score(self, name: str, question: str, texts: list[str]) -> np.ndarray:
        """See :meth:`~specrag.retrieval.encoder.reranker.Reranker.score`."""
        return self._encoders.reranker(name).score(question, texts)


class DeployedEncoders(Encoders):
    """Encoders and rerankers whose work is done by deployments of this application.

    The models' files must be on this node too: they tell how texts are prepared and what a knowledge base was made
    with. Their weights are not loaded.

    Args:
        deployments: which of ``encoder`` and ``reranker`` are deployed; the work of the other is done here.
    """

    def __init__(self, deployments: Collection[str]) -> None:
        super().__init__()
        self._deployments = deployments

    def _load_encoder(self, name: str, dtype: str) -> Encoder:
        if "encoder" not in self._deployments:
            return super()._load_encoder(name, dtype)
        return DeployedEncoder(*find_encoder(name), dtype, Deployment("encoder"))

    def _load_reranker(self, name: str) -> Reranker:
        if "reranker" not in self._deployments:
            return super()._load_reranker(name)
        return DeployedReranker(name, checked_reranker(name), Deployment("reranker"))


class Deployment:
    """Another deployment of the application to which this replica belongs."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._handle: Any = serve.get_deployment_handle(name)

    def call(self, method: str, *given: Any) -> Any:
        """Call a method that has no effect but its result, and wait for it in this thread.

        Raises:
            UpstreamError: no replica answered.
            SpecragError: a replica cannot do it.
        """
        reason = ""
        for _ in range(_TRIES):
            try:
                return self._handle.options(method_name=method).remote(*given).result(timeout_s=_SECONDS)
            except RayTaskError as error:
                why = error.cause if isinstance(error.cause, SpecragError) else str(error).splitlines()[-1]
                raise SpecragError(f"a replica of {self.name!r} cannot do it: {why}") from None
            except TimeoutError:
                reason = f"no answer within {_SECONDS:g} seconds"
                break
            except (RayError, RayServeException):  # the replica died, or there is none at the moment
                reason = "no replica answered"
        raise UpstreamError(self.name, reason, status=503, retry_after=5)


class DeployedEncoder(Encoder):
    """An encoder whose vectors a deployment computes.

    Args:
        name, files, settings, dtype: of the encoder.
        deployment: computes the vectors.

    Raises:
        SpecragError: the deployment has another encoder under this name, or cannot load it.
    """

    def __init__(
        self, name: str, files: ModelFiles, settings: EncoderSettings, dtype: str, deployment: Deployment
    ) -> None:
        fingerprint, dimension = deployment.call("describe", name, dtype)
        super().__init__(name, files, settings, _DeployedNetwork(name, dtype, dimension, deployment), dtype)
        self._deployment = deployment
        if fingerprint != self.fingerprint:
            raise SpecragError(
                f"encoder {name!r} of {deployment.name!r} is another one ({fingerprint}) than here "
                f"({self.fingerprint}); fetch it again on all nodes"
            )

    def encode_queries(self, texts: Sequence[str]) -> np.ndarray:
        """See :class:`~specrag.retrieval.encoder.encoder.Encoder`; all texts go in one call."""
        if not texts or not all(isinstance(text, str) for text in texts):
            return super().encode_queries(texts)  # refuses
        vectors: np.ndarray = self._deployment.call("encode_queries", self.name, self.dtype, list(texts))
        return vectors


class _DeployedNetwork:
    """A network that a deployment computes."""

    def __init__(self, name: str, dtype: str, dimension: int, deployment: Deployment) -> None:
        self.dimension = dimension
        self._of = name, dtype
        self._deployment = deployment

    def encode(
        self, texts: Sequence[str], prompt: str = "", progress: Callable[[int], None] | None = None
    ) -> np.ndarray:
        vectors: np.ndarray = self._deployment.call("encode", *self._of, list(texts), prompt)
        if progress is not None:
            progress(len(texts))
        return vectors


class DeployedReranker(Reranker):
    """A reranker whose scores a deployment computes."""

    def __init__(self, name: str, files: ModelFiles, deployment: Deployment) -> None:
        super().__init__(name, files, None)
        self._deployment = deployment

    def _score(self, question: str, texts: list[str]) -> np.ndarray:
        scores: np.ndarray = self._deployment.call("score", self.name, question, texts)
        return scores
