"""The optimizer step: reduce, clip, apply."""
