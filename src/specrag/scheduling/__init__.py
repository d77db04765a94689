"""How much to guess."""
