"""Model files: names, downloads, conversion, weights, tokenizers and adapters."""
