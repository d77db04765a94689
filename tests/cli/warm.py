"""Fetches compiled loops from the disk."""

import torch

from specrag.models.row_ops import row_ops

row_ops(torch.bfloat16, torch.device("cpu"))
