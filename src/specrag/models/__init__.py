"""Language models: names and files, weights, tokenizers, adapters, networks, and endpoints."""
