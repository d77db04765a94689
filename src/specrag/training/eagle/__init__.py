"""Training of EAGLE heads: ``specrag train eagle``."""
