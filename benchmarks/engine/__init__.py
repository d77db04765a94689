"""Plain decoding beside transformers, and the cost of a pass."""
