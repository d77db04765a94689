"""Guess and check: draft trees, drafters, acceptance rules, and the loop that joins them."""
