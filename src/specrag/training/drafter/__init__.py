"""Training of RAG drafters: ``specrag train drafter``."""
