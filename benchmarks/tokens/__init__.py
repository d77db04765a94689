"""Token-level methods on Spec-Bench."""
