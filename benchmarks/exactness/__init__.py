"""Whether speculated text equals the text of plain decoding."""
