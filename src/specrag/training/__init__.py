"""Training of what guesses: heads for the embedded models."""
