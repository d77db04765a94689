"""The knowledge base, its indexes and its encoder."""
