"""OpenAI's API: chat completions, completions, embeddings."""
