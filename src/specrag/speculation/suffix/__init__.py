"""Where suffixes occurred before: in one growing sequence of tokens, and in a static corpus."""
