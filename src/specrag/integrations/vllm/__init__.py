"""A proposer for vLLM's speculative decoding, named on its command line.

``--speculative-config '{"method": "custom_class", "model": "specrag.integrations.vllm.Drafter", ...}'``. Importing this
needs neither torch nor vLLM.
"""

from typing import TYPE_CHECKING

from specrag.lazy import lazy_names

if TYPE_CHECKING:
    from specrag.integrations.vllm.drafter import Drafter
    from specrag.integrations.vllm.settings import Settings
    from specrag.integrations.vllm.stats import Stats
else:
    __getattr__ = lazy_names(__name__)

__all__ = ["Drafter", "Settings", "Stats"]
