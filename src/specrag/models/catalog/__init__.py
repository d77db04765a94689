"""Models by name: sources, downloads, conversion and the store of finished models."""

from specrag.models.catalog.names import (
    ModelFiles,
    ModelStatus,
    default_model,
    hub_models,
    list_models,
    make,
    path,
    pull,
    ready,
    resolve,
)

__all__ = [
    "ModelFiles",
    "ModelStatus",
    "default_model",
    "hub_models",
    "list_models",
    "make",
    "path",
    "pull",
    "ready",
    "resolve",
]
