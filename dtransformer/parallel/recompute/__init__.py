"""Recompute: the backward pass computes activations again instead of keeping them."""
