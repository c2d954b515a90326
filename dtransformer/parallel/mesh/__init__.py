"""The DTensor mesh: its cluster, layouts, variables, batches and compiled functions."""
