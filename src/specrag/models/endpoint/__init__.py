"""Models behind OpenAI-compatible endpoints, as text generators and scorers."""

from specrag.models.endpoint.client import Endpoint, PooledEndpoint, open_endpoint
from specrag.models.endpoint.connection import EndpointSettings, Refused
from specrag.models.endpoint.pool import Pool, PoolSettings, ReplicaSettings
from specrag.models.endpoint.transport import Address

__all__ = [
    "Address",
    "Endpoint",
    "EndpointSettings",
    "Pool",
    "PoolSettings",
    "PooledEndpoint",
    "Refused",
    "ReplicaSettings",
    "open_endpoint",
]
