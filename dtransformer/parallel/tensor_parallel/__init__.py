"""Tensor parallelism: sharded products, embeddings and cross entropy."""
