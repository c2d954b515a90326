"""Attention of sequences that are sharded over the context axis: what is sent, and in which order."""
