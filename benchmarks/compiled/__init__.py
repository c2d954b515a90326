"""Sizes of the networks that benchmarks/gpu_compiled.py compiles with our library and with JAX."""

_GPT = {"kind": "gpt", "length": 1024, "rows": 8, "vocab_size": 50304}
# Name -> sizes. h: hidden size, n: query heads, m: key-value heads, f: feed-forward size.
NETWORKS = {
    "gpt_355m": {**_GPT, "blocks": 24, "h": 1024, "n": 16, "m": 16, "f": 4096},
    "gpt_1.3b": {**_GPT, "blocks": 24, "h": 2048, "n": 16, "m": 16, "f": 8192},
    "llama_1b": {
        "kind": "llama",
        "length": 2048,
        "rows": 4,
        "vocab_size": 128256,
        "blocks": 16,
        "h": 2048,
        "n": 32,
        "m": 8,
        "f": 8192,
    },
    "bert_large": {
        "kind": "bert",
        "length": 512,
        "rows": 16,
        "vocab_size": 30528,
        "blocks": 24,
        "h": 1024,
        "n": 16,
        "m": 16,
        "f": 4096,
    },
    "t5_large": {
        "kind": "t5",
        "length": 512,
        "rows": 8,
        "vocab_size": 32128,
        "blocks": 24,
        "h": 1024,
        "n": 16,
        "m": 16,
        "f": 4096,
    },
    "tiny": {**_GPT, "blocks": 2, "h": 128, "n": 2, "m": 2, "f": 512, "length": 128, "rows": 2},
}
