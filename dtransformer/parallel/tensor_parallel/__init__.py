"""Products, look-ups and losses whose weights are sharded over the model axis."""
