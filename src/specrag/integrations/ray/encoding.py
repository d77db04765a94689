"""Encodes passages on all nodes of a Ray cluster.

The knowledge base is still written by one process. A task encodes one batch and touches nothing else, so it may run
twice; Ray runs it again if its node has died.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from specrag.errors import InputError, SpecragError
from specrag.extras import needed_by
from specrag.retrieval.encoder import Encoder, load_encoder

with needed_by("ray"):
    import ray
    from ray.exceptions import RayError, RayTaskError

if TYPE_CHECKING:
    from ray import ObjectRef

#: Passages of a task: about a second on one processor, and a result that Ray sends without storing it on a node.
BATCH = 64

#: Seconds without a finished task after which the cluster is checked.
_LOOK_SECONDS = 10.0


def connect(address: str) -> None:
    """Join a cluster.

    Args:
        address: ``HOST:PORT`` or ``ray://HOST:PORT`` of its head, ``auto`` for the cluster that this machine is in,
            ``local`` to start one here.

    Raises:
        InputError: there is no cluster.
    """
    if ray.is_initialized():
        return
    try:
        ray.init(
            address=address, log_to_driver=False, include_dashboard=False if address == "local" else None
        )
    except (ConnectionError, ValueError, RuntimeError, TimeoutError) as error:
        reason = " ".join(str(error).split())[:160]
        remedy = f"give HOST:PORT of a head that `ray start --head` has started, auto, or local ({reason})"
        raise InputError("--ray", address, remedy) from None


class ClusterEncoder(Encoder):
    """An encoder whose passages are encoded by tasks on all nodes; each node needs specrag and the encoder's files.

    Args:
        here: the same encoder on this machine; it encodes queries, and the nodes' vectors must equal its own.
        batch: passages of a task. The last bits of the vectors depend on it, but not on what happens to the nodes.
    """

    def __init__(self, here: Encoder, batch: int = BATCH) -> None:
        super().__init__(here.name, here._files, here.settings, here.network, here.dtype)
        self._batch = batch

    def encode_passages(
        self, texts: Sequence[str], progress: Callable[[int], None] | None = None
    ) -> np.ndarray:
        """See :class:`~specrag.retrieval.encoder.encoder.Encoder`.

        Raises:
            SpecragError: a node has another encoder under this name or cannot load it, or no node is left.
        """
        texts = list(texts)
        vectors = np.empty((len(texts), self.dimension), dtype=np.float32)
        waiting: dict[ObjectRef[np.ndarray], int] = {
            _encode.remote(self.name, self.dtype, self.fingerprint, texts[start : start + self._batch]): start
            for start in range(0, len(texts), self._batch)
        }
        try:
            while waiting:
                ended, _ = ray.wait(list(waiting), num_returns=1, timeout=_LOOK_SECONDS)
                if not ended:
                    _check_nodes()
                for reference in ended:
                    start = waiting.pop(reference)
                    found = _result(reference)
                    vectors[start : start + len(found)] = found
                    if progress is not None:
                        progress(len(found))
        finally:
            for reference in waiting:
                ray.cancel(reference)
        return vectors


def _result(reference: ObjectRef[np.ndarray]) -> np.ndarray:
    try:
        found: np.ndarray = ray.get(reference)
    except RayTaskError as error:
        reason = error.cause if isinstance(error.cause, SpecragError) else str(error).splitlines()[-1]
        raise SpecragError(f"a node of the cluster cannot encode: {reason}") from None
    except RayError as error:
        raise SpecragError(f"the cluster has lost a task: {' '.join(str(error).split())[:160]}") from None
    return found


def _check_nodes() -> None:
    """Check that some node can still run tasks.

    Raises:
        SpecragError: none can.
    """
    if not ray.cluster_resources().get("CPU"):
        raise SpecragError("no node of the cluster has a processor left: start one, and index again")


@ray.remote(num_cpus=1, max_retries=-1, scheduling_strategy="SPREAD")  # type: ignore[untyped-decorator]
def _encode(name: str, dtype: str, fingerprint: str, texts: list[str]) -> np.ndarray:
    encoder = _loaded(name, dtype)
    if encoder.fingerprint != fingerprint:
        raise SpecragError(f"encoder {name!r} is another one there ({encoder.fingerprint}); fetch it again")
    return encoder.encode_passages(texts)


@lru_cache(maxsize=1)
def _loaded(name: str, dtype: str) -> Encoder:
    """The encoder of this worker process."""
    return load_encoder(name, dtype=dtype)
