"""Whole RAG answers over HTTP: the first token, the last one, and what need not be read."""
