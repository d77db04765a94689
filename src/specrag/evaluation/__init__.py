"""How good answers are, and whether a difference between two methods is real."""
