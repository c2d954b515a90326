"""Write small records, models and configs of all tasks into a folder."""

import json

import yaml

from dtransformer.models import CausalLM, save_pretrained
from harness.byte_tokenizer import write_byte_tokenizer

LLAMA = {
    "hidden_size": 16,
    "num_heads": 4,
    "num_kv_heads": 2,
    "num_layers": 1,
    "positions": "rotary",
    "hidden_act": "silu",
    "norm": "rms_norm",
    "gated": True,
    "use_bias": False,
    "tied_head": False,
    "embedding_scale": 1.0,
    "pad_id": None,
    "start_id": 1,
    "end_id": 2,
    "dropout_rate": 0.0,
}
SIZES = {"hidden_size": 16, "num_heads": 2, "num_layers": 1, "dropout_rate": 0.0}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
NUMBERS = "zero one two three four five six seven".split()


def chats():
    """Yield conversations with two answers each."""
    for a in range(8):
        for b in range(4):
            question = {"role": "user", "content": f"{NUMBERS[a]} and {NUMBERS[b]}?"}
            answer = {"role": "assistant", "content": f"{NUMBERS[(a + b) % 8]}"}
            thanks = {"role": "user", "content": "thanks"}
            yield {"messages": [question, answer, thanks, {**answer, "content": "welcome"}]}


def records():
    """Return a dict from file names to the records of each task."""
    texts = [f"{a} or {b}, {'yes' if a > b else 'no'}" for a in NUMBERS for b in NUMBERS[:3]]
    pairs = [(f"{a}?", a) for a in NUMBERS]
    return {
        "chat": list(chats()),
        "alpaca": [{"instruction": "say", "input": a, "output": a * 2} for a in NUMBERS * 2],
        "pairs": [
            {"prompt": x["messages"][:1], "chosen": x["messages"][1:2], "rejected": [no]}
            for x in chats()
            for no in [{"role": "assistant", "content": "no"}]
        ],
        "answers": [
            {"prompt": f"{a}?", "completion": a if i % 3 else NUMBERS[-i - 1], "label": i % 3 > 0}
            for i, a in enumerate(NUMBERS)
        ],
        "labels": [{"text": x, "label": x.split(", ")[1]} for x in texts],
        "numbers": [{"text": x, "text_pair": "or", "label": len(x) / 10} for x in texts],
        "words": [
            {"tokens": x.split(), "labels": [w in NUMBERS for w in x.split()]} for x in texts
        ],
        "queries": [{"query": q, "positive": a} for q, a in pairs],
        "documents": [
            {"query": f"{a}?", "document": b, "label": int(a == b)}
            for a in NUMBERS
            for b in NUMBERS[:4]
        ],
        "lists": [
            {"query": f"{a}?", "positive": a, "negatives": NUMBERS[i + 1 : i + 4] or ["zero"]}
            for i, a in enumerate(NUMBERS)
        ],
        "sequences": [{"prompt": q, "completion": a} for q, a in pairs * 4],
    }


def write(folder, **sizes):
    """Write the records, a text and a published Llama with a tokenizer of bytes and a template.

    `sizes` replace sizes of the Llama.
    """
    for name, rows in records().items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    texts = [x["messages"][0]["content"] + " " + x["messages"][1]["content"] for x in chats()]
    (folder / "text.txt").write_text("\n\n".join(texts * 3))
    network = CausalLM(290, **{**LLAMA, **sizes})
    network.build()
    save_pretrained(network, folder / "llama", "llama")
    write_byte_tokenizer(folder / "llama", texts, TEMPLATE)


TRAINING = {"batch_size": 4, "learning_rate": 0.01, "optimizer": "sgd", "weight_decay": 0}
CONFIGS = {
    "gpt": {
        "task": "causal_lm",
        "data": {"train": "text.txt", "dev": "text.txt", "length": 32},
        "tokenizer": {"folder": "llama"},
        "model": {**SIZES, "embedding_scale": 1.0},
        "training": {
            **TRAINING,
            "max_steps": 6,
            "z_loss": 0.01,
            "groups": [
                {"pattern": "embedding/*", "learning_rate_factor": 0.5, "weight_decay": 0.1}
            ],
        },
        "export": {"folder": "models/gpt", "family": "gpt2"},
    },
    "chat": {
        "task": "chat",
        "data": {
            "train": [
                {"path": "chat.jsonl", "weight": 0.7},
                {"path": "alpaca.jsonl", "weight": 0.3},
            ],
            "dev": "chat.jsonl",
            "length": 64,
            "packed": True,
        },
        "model": {
            "from": "llama",
            "adapters": {
                "rank": 2,
                "targets": "*attention/*_kernel",
                "rslora": True,
                "kind": "dora",
            },
        },
        "training": {**TRAINING, "learning_rate": 0.3, "ema": 0.5},
    },
    "preference": {
        "task": "preference",
        "data": {"train": "pairs.jsonl", "dev": "pairs.jsonl", "length": 32},
        "model": {"from": "runs/chat", "adapters": {"rank": 2}},
        "training": TRAINING,
    },
    "kto": {
        "task": "kto",
        "data": {"train": "answers.jsonl", "dev": "answers.jsonl", "length": 32},
        "model": {"from": "llama", "adapters": {"rank": 2}},
        "training": TRAINING,
    },
    "reward": {
        "task": "reward",
        "data": {"train": "pairs.jsonl", "dev": "pairs.jsonl", "length": 32},
        "model": {"from": "llama"},
        "training": TRAINING,
    },
    "classification": {
        "task": "classification",
        "data": {"train": "labels.jsonl", "dev": "labels.jsonl", "length": 32},
        "tokenizer": {"folder": "llama"},
        "model": SIZES,
        "training": {**TRAINING, "epochs": 4, "optimizer": "adamw"},
    },
    "regression": {
        "task": "regression",
        "data": {"train": "numbers.jsonl", "dev": "numbers.jsonl", "length": 32},
        "tokenizer": {"vocab_size": 50},
        "model": SIZES,
        "training": TRAINING,
    },
    "token_classification": {
        "task": "token_classification",
        "data": {"train": "words.jsonl", "dev": "words.jsonl", "length": 32},
        "model": {"from": "llama"},
        "training": TRAINING,
    },
    "embedding": {
        "task": "embedding",
        "data": {"train": "queries.jsonl", "dev": "queries.jsonl", "length": 16},
        "tokenizer": {"folder": "llama"},
        "model": SIZES,
        "training": TRAINING,
    },
    "ranking": {
        "task": "ranking",
        "data": {"train": "lists.jsonl", "dev": "lists.jsonl", "length": 24},
        "tokenizer": {"folder": "llama"},
        "model": SIZES,
        "training": {**TRAINING, "epochs": 10},
    },
    "seq2seq": {
        "task": "seq2seq",
        "data": {"train": "sequences.jsonl", "dev": "sequences.jsonl", "length": 16},
        "tokenizer": {"vocab_size": 44},
        "model": {
            **{k: x for k, x in SIZES.items() if k != "num_layers"},
            "encoder_layers": 1,
            "decoder_layers": 1,
        },
        "training": TRAINING,
    },
}


def write_config(name, folder):
    """Write the named config into a folder and return its path."""
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(CONFIGS[name]))
    return path
