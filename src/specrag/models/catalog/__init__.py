"""Models by name: sources, downloads, conversion and the store of finished models."""

from typing import TYPE_CHECKING

from specrag.lazy import lazy_names

if TYPE_CHECKING:
    from specrag.models.catalog.names import (
        ModelFiles,
        ModelStatus,
        catalog_name,
        default_model,
        hub_models,
        list_models,
        make,
        path,
        pull,
        ready,
        resolve,
    )
    from specrag.models.catalog.sources import SMALL, SOURCES
    from specrag.models.catalog.store import Store, home, sha256_of
else:
    __getattr__ = lazy_names(__name__)

__all__ = [
    "SMALL",
    "SOURCES",
    "ModelFiles",
    "ModelStatus",
    "Store",
    "catalog_name",
    "default_model",
    "home",
    "hub_models",
    "list_models",
    "make",
    "path",
    "pull",
    "ready",
    "resolve",
    "sha256_of",
]
