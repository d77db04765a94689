"""kNN-LM: perplexity, exactness and speed."""
