"""RaLMSpec against sequential retrieval."""
