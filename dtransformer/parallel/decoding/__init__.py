"""Token-by-token decoding and its cache of keys and values."""
