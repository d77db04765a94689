"""Models behind OpenAI-compatible endpoints, as text generators and scorers."""

from typing import TYPE_CHECKING

from specrag.lazy import lazy_names

if TYPE_CHECKING:
    from specrag.models.endpoint.chunks import Chunk, Counted, Piece, as_finish_reason, read_answer
    from specrag.models.endpoint.client import Endpoint, PooledEndpoint, open_endpoint
    from specrag.models.endpoint.connection import Call, EndpointSettings, Refused
    from specrag.models.endpoint.pool import Pool, PoolSettings, Replica, ReplicaSettings
    from specrag.models.endpoint.prompts import Prompts
    from specrag.models.endpoint.transport import Address, CallError
else:
    __getattr__ = lazy_names(__name__)

__all__ = [
    "Address",
    "Call",
    "CallError",
    "Chunk",
    "Counted",
    "Endpoint",
    "EndpointSettings",
    "Piece",
    "Pool",
    "PoolSettings",
    "PooledEndpoint",
    "Prompts",
    "Refused",
    "Replica",
    "ReplicaSettings",
    "as_finish_reason",
    "open_endpoint",
    "read_answer",
]
