"""The context of tracing, and functions that are traced once for many blocks."""
