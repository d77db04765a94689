"""Recipes that make training data for RAG drafters: questions from passages, and rationales for their answers.

They run from a clone of the repository (``specrag train questions`` and ``specrag train rationales``) and are not part
of the installed package.
"""
