"""Optimizer sharding: partitions of weights, and weights that are all-gathered when they are used."""
