"""DTensor mesh: layouts, variables, batches and compiled functions."""
