"""Decoding token by token, and what attention keeps meanwhile."""
