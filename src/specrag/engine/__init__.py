"""The engine: sessions, passes and the executor that packs them, key/value caches, sampling and stopping."""

from typing import TYPE_CHECKING

from specrag.lazy import lazy_names

if TYPE_CHECKING:
    from specrag.engine.compiling import (
        compiled,
        exact,
        fastmath,
        fastmath_infinite,
        inlined,
        inlined_exact,
        threaded,
        threaded_exact,
        without_compiling,
    )
    from specrag.engine.draws import keyed_choice, keyed_gumbel, keyed_uniform
    from specrag.engine.executor import MAX_ROWS, Executor, Task, run
    from specrag.engine.kv import Extent, KeyValueCache, KeyValueShape
    from specrag.engine.memory import (
        MemoryNeed,
        SessionNeed,
        check_memory,
        estimate_memory,
        free_bytes,
        keys_values_bytes,
        peak_bytes,
        weights_bytes,
    )
    from specrag.engine.outputs import ARGMAX, LOGITS, NOTHING, HiddenState, Outputs, Row
    from specrag.engine.passes import (
        Cache,
        Coroutine,
        Emit,
        Others,
        Pass,
        PassReport,
        Search,
        Segment,
        SessionModel,
        Start,
        Wait,
        gather,
    )
    from specrag.engine.prefix_cache import MIN_SHARED_TOKENS, PrefixCache
    from specrag.engine.prefix_file import PrefixFileError, load_prefix, remove_unfinished, save_prefix
    from specrag.engine.processors import (
        AllowedTokens,
        Chain,
        Logits,
        LogitsProcessor,
        OutputPath,
        State,
        build_processors,
    )
    from specrag.engine.sampling import Distribution, choose, log_softmax, warp
    from specrag.engine.sampling_params import SamplingParams, TokenBias
    from specrag.engine.session import PREFILL_ROWS, Movable, Session, check_room
    from specrag.engine.stopping import FinishReason, StopChecker, StopConditions
    from specrag.engine.threads import in_own_thread, use_one_thread
else:
    __getattr__ = lazy_names(__name__)

__all__ = [
    "ARGMAX",
    "LOGITS",
    "MAX_ROWS",
    "MIN_SHARED_TOKENS",
    "NOTHING",
    "PREFILL_ROWS",
    "AllowedTokens",
    "Cache",
    "Chain",
    "Coroutine",
    "Distribution",
    "Emit",
    "Executor",
    "Extent",
    "FinishReason",
    "HiddenState",
    "KeyValueCache",
    "KeyValueShape",
    "Logits",
    "LogitsProcessor",
    "MemoryNeed",
    "Movable",
    "Others",
    "OutputPath",
    "Outputs",
    "Pass",
    "PassReport",
    "PrefixCache",
    "PrefixFileError",
    "Row",
    "SamplingParams",
    "Search",
    "Segment",
    "Session",
    "SessionModel",
    "SessionNeed",
    "Start",
    "State",
    "StopChecker",
    "StopConditions",
    "Task",
    "TokenBias",
    "Wait",
    "build_processors",
    "check_memory",
    "check_room",
    "choose",
    "compiled",
    "estimate_memory",
    "exact",
    "fastmath",
    "fastmath_infinite",
    "free_bytes",
    "gather",
    "in_own_thread",
    "inlined",
    "inlined_exact",
    "keyed_choice",
    "keyed_gumbel",
    "keyed_uniform",
    "keys_values_bytes",
    "load_prefix",
    "log_softmax",
    "peak_bytes",
    "remove_unfinished",
    "run",
    "save_prefix",
    "threaded",
    "threaded_exact",
    "use_one_thread",
    "warp",
    "weights_bytes",
    "without_compiling",
]
