"""The drafter inside vLLM, against vLLM without and with its own drafts."""
