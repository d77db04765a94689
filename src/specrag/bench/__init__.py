"""Measuring: suites, resumable records, interleaved timing, statistics and reports."""
