"""Measurements of specrag, a folder a suite: ``specrag bench NAME`` runs ``suite()`` of ``benchmarks.NAME.suite``."""
