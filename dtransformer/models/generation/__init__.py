"""Text generation: search, decoding and sampling."""
