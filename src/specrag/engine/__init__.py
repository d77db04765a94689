"""Passes over a model: sessions, key/value extents, sampling and stopping."""
