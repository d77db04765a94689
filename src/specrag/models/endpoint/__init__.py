"""Models behind OpenAI-compatible endpoints, as text generators and scorers."""

from specrag.models.endpoint.client import Endpoint, open_endpoint
from specrag.models.endpoint.connection import EndpointSettings

__all__ = ["Endpoint", "EndpointSettings", "open_endpoint"]
