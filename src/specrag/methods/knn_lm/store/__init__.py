"""kNN-LM datastores (Khandelwal et al., 2020): built from text, opened, and searched."""
