"""Generation of text: search, decoding, sampling."""
