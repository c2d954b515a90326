"""Configs of tiny models for classes of `transformers`."""

ENCODER = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 24,
}
DISTILBERT = {"vocab_size": 40, "dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 32}
T5 = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
