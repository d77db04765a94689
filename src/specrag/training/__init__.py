"""Training of EAGLE heads and RAG drafters."""
