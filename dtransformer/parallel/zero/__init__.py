"""Optimizer sharding: who holds what, and weights that are unsharded for their use."""
