"""kNN-LM datastores (Khandelwal et al., 2020): built from text, opened, and searched."""

from typing import TYPE_CHECKING

from specrag.lazy import lazy_names

if TYPE_CHECKING:
    from specrag.methods.knn_lm.store.build import build_datastore, check_folder
    from specrag.methods.knn_lm.store.datastore import Datastore, model_record
    from specrag.methods.knn_lm.store.index import GraphSettings, IndexSettings, QuantiserSettings
    from specrag.methods.knn_lm.store.manifest import DatastoreManifest, WindowSettings
    from specrag.methods.knn_lm.store.windows import read_texts
else:
    __getattr__ = lazy_names(__name__)

__all__ = [
    "Datastore",
    "DatastoreManifest",
    "GraphSettings",
    "IndexSettings",
    "QuantiserSettings",
    "WindowSettings",
    "build_datastore",
    "check_folder",
    "model_record",
    "read_texts",
]
