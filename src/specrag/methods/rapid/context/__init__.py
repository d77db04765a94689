"""Context retrieval: the part of a long context that answers a question (RAPID, section 3.1)."""
