"""Retrieval: documents to passages, passages to indexes, questions to hits."""
