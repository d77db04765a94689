"""Retrieval: from documents to passages, from passages to indexes, from questions to hits."""
