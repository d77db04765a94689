"""Every architecture that transformers knows, as a model that keeps sessions.

The module is transformers' own; only its attention is ours, plugged in through ``transformers.AttentionInterface``.
The module computes embeddings, norms, feed-forward blocks, experts and positions over the packed rows of all sessions
as if they were one sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel

from specrag.engine import HiddenState, KeyValueCache, KeyValueShape, Row, Segment
from specrag.engine.attention import AttentionPlan
from specrag.engine.cpu.spinning import watch_others
from specrag.errors import InputError
from specrag.models.logits import read_rows

#: The name under which the packed attention is registered with transformers.
ATTENTION = "specrag_packed"


def packed_attention(  # noqa: PLR0913 - as transformers calls it
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    specrag_plan: AttentionPlan | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Packed attention with the signature that transformers expects: ``query [1, heads, rows, head_dim]`` and so on."""
    del attention_mask, dropout
    if specrag_plan is None:
        raise InputError("attention", ATTENTION, "the module lost the plan of the pass; it cannot run packed")
    if s_aux is not None:
        raise InputError(
            "model", type(module).__name__, "attention sinks are not computed yet; take another model"
        )
    plan = specrag_plan
    layer: int = module.layer_idx  # type: ignore[assignment]
    plan.write(layer, key[0].transpose(0, 1), value[0].transpose(0, 1))
    heads, rows, head_dim = query.shape[1:]
    scale = head_dim**-0.5 if scaling is None else scaling
    folded = (query[0] * scale).unflatten(0, (-1, plan.group)).transpose(1, 2)
    mixed = plan.attend(
        layer,
        folded.reshape(heads // plan.group, rows * plan.group, head_dim),
        window=sliding_window,
        softcap=softcap,
    )
    out = mixed.unflatten(1, (rows, plan.group)).permute(1, 0, 2, 3).reshape(1, rows, heads, head_dim)
    return out, None


AttentionInterface.register(ATTENTION, packed_attention)


class TransformersModel:
    """A :class:`~specrag.engine.passes.SessionModel` around a causal language model of transformers.

    Args:
        module: the module; its attention implementation is set to the packed one.
        weights: a state dict to load into it, if it does not have its weights yet.
        int8_kv: keep keys and values in 8 bits.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        weights: Mapping[str, torch.Tensor] | None = None,
        *,
        int8_kv: bool = False,
    ) -> None:
        if weights is not None:
            module.load_state_dict(weights)
        module.set_attn_implementation(ATTENTION)
        self.module = module.eval()
        self.config: Any = module.config.get_text_config()
        self._heads = int(self.config.num_attention_heads)
        self._kv_heads = int(getattr(self.config, "num_key_value_heads", None) or self._heads)
        head_dim = getattr(self.config, "head_dim", None) or self.config.hidden_size // self._heads
        self.device = module.device
        self.dtype = module.dtype
        self._shape = KeyValueShape(
            self.config.num_hidden_layers, self._kv_heads, int(head_dim), module.dtype, module.device, int8_kv
        )
        self._base = module.base_model

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @property
    def context_length(self) -> int:
        return int(self.config.max_position_embeddings)

    def new_cache(self) -> KeyValueCache:
        return KeyValueCache(self._shape)

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment]) -> list[list[Row]]:
        watch_others()
        plan = AttentionPlan(segments, self._heads // self._kv_heads)
        tokens = torch.tensor(
            [[token for segment in segments for token in segment.tokens]], device=self.device
        )
        wanted = [outputs for segment in segments for outputs in segment.outputs]
        kept = {name for outputs in wanted for name in outputs.hidden}
        hidden: dict[HiddenState, torch.Tensor] = {}
        hooks = [self._keep(name, hidden) for name in kept if name != "final"]
        try:
            output = self._base(
                input_ids=tokens,
                position_ids=torch.tensor([plan.positions], device=self.device),
                use_cache=False,
                specrag_plan=plan,
            )
        finally:
            for hook in hooks:
                hook.remove()
        hidden["final"] = output.last_hidden_state[0]
        rows = iter(read_rows(wanted, hidden, self._logits))
        return [[next(rows) for _ in segment.tokens] for segment in segments]

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.module.get_output_embeddings()(hidden)
        cap = getattr(self.config, "final_logit_softcapping", None)
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _keep(self, name: HiddenState, hidden: dict[HiddenState, torch.Tensor]) -> Any:
        """Register a hook that stores a hidden state while the module runs."""
        layers = next(child for child in self._base.children() if isinstance(child, torch.nn.ModuleList))
        last = layers[-1]
        if name == "last":
            return last.register_forward_hook(_keep_output(name, hidden))
        for child_name in ("mlp", "feed_forward", "block_sparse_moe"):
            if hasattr(last, child_name):
                return getattr(last, child_name).register_forward_pre_hook(_keep_input(name, hidden))
        raise InputError("hidden", name, f"{type(last).__name__} has no feed-forward block of a known name")


def _keep_output(name: HiddenState, hidden: dict[HiddenState, torch.Tensor]) -> Callable[..., None]:
    def hook(_module: Any, _args: Any, output: Any) -> None:
        hidden[name] = (output[0] if isinstance(output, tuple) else output)[0]

    return hook


def _keep_input(name: HiddenState, hidden: dict[HiddenState, torch.Tensor]) -> Callable[..., None]:
    def hook(_module: Any, args: Any) -> None:
        hidden[name] = args[0][0]

    return hook
