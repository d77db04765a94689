"""From a pass's last hidden states to the rows' answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from specrag.engine.outputs import HiddenState, Outputs, Row


def read_rows(
    wanted: Sequence[Outputs],
    hidden: dict[HiddenState, torch.Tensor],
    head: Callable[[torch.Tensor], torch.Tensor],
) -> list[Row]:
    """Answer every row.

    Args:
        wanted: what each row wants.
        hidden: ``[rows, hidden_size]`` for each hidden state that some row asks for, and always ``final``.
        head: the output matrix, ``[rows, hidden_size]`` -> ``[rows, vocab_size]``; called once, with only the
            rows that need logits.
    """
    rows = [Row() for _ in wanted]
    index = [number for number, outputs in enumerate(wanted) if outputs.needs_logits]
    if index:
        final = hidden["final"]
        logits = head(final if len(index) == len(wanted) else final[index])
        _read_logits([wanted[number] for number in index], [rows[number] for number in index], logits)
    for number, outputs in enumerate(wanted):
        if outputs.hidden:
            rows[number].hidden = {name: hidden[name][number] for name in outputs.hidden}
    return rows


def _read_logits(wanted: list[Outputs], rows: list[Row], logits: torch.Tensor) -> None:
    if any(outputs.argmax for outputs in wanted):
        for row, token in zip(rows, logits.argmax(dim=-1).tolist(), strict=True):
            row.argmax = token
    for number, (outputs, row) in enumerate(zip(wanted, rows, strict=True)):
        if outputs.logits:
            row.logits = logits[number].float().cpu().numpy()
        if outputs.entropy or outputs.top_k or outputs.log_probs_of:
            log_probs = torch.log_softmax(logits[number].float(), dim=-1)
            if outputs.entropy:
                # A removed token has log-probability -inf and adds nothing.
                row.entropy = float(-(log_probs.exp() * log_probs.clamp_min(-1e30)).sum())
            if outputs.top_k:
                # A stable sort of the best few puts the smaller id first on a tie.
                count = min(outputs.top_k, log_probs.shape[0])
                border = torch.topk(log_probs, count).values[-1]
                best = torch.nonzero(log_probs >= border).flatten()
                order = torch.sort(log_probs[best], descending=True, stable=True).indices[:count]
                tokens = best[order]
                row.top_tokens = tokens.cpu().numpy()
                row.top_log_probs = log_probs[tokens].cpu().numpy()
            if outputs.log_probs_of:
                row.log_probs = log_probs[list(outputs.log_probs_of)].cpu().numpy()
