"""Accuracy and latency of answers from passages."""
