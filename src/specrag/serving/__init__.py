"""An OpenAI-compatible server that speculates, its knowledge bases and its page."""
