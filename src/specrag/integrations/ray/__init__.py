"""specrag on a Ray cluster: the server as a Ray Serve application, and passages encoded on all nodes.

``serve run specrag.integrations.ray:app config=gateway.toml`` serves what ``specrag serve --config gateway.toml`` does,
with as many replicas as needed. ``specrag index --ray ADDRESS`` encodes with a :class:`ClusterEncoder`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specrag.lazy import lazy_names

if TYPE_CHECKING:
    from specrag.integrations.ray.encoding import ClusterEncoder, connect
    from specrag.integrations.ray.serving import AppArgs, Replicas, app
else:
    __getattr__ = lazy_names(__name__)

__all__ = ["AppArgs", "ClusterEncoder", "Replicas", "app", "connect"]
