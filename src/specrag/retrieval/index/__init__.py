"""Indexes over passages: exact, graph, BM25 and hybrid search, all scored by one kernel."""
