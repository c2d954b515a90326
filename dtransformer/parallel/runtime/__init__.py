"""The job of ranks: its start, its devices, its groups, its end."""
