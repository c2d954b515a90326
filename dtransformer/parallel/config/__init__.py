"""Parallel configs, their validation, and the coordinates of ranks, without side effects."""
