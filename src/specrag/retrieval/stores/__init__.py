"""Knowledge bases in external databases."""

from typing import TYPE_CHECKING

from specrag.lazy import lazy_names

if TYPE_CHECKING:
    from specrag.retrieval.stores.base import Limits, Loading
    from specrag.retrieval.stores.questions import QuestionSearch
    from specrag.retrieval.stores.registry import check_load, is_address, load, open_store, shown
else:
    __getattr__ = lazy_names(__name__)

__all__ = [
    "Limits",
    "Loading",
    "QuestionSearch",
    "check_load",
    "is_address",
    "load",
    "open_store",
    "shown",
]
