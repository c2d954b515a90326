"""Context parallelism: attention over sequences that are sharded over the context axis."""
