"""Small models of published families that all contestants train from the same weights.

All environments import this file, so it needs only NumPy.
"""

import dataclasses
import os
import pathlib

import numpy as np

FOLDER = "DTRANSFORMER_PUBLISHED"  # Environment variable with the models' folder.
IGNORED, PAD, START, END, MASK = -100, 0, 1, 2, 3
# Settings of AdamW. ε is so small that its exact position in the formula does not matter.
LEARNING_RATE, WEIGHT_DECAY, EPSILON = 1e-4, 0.01, 1e-10


@dataclasses.dataclass(frozen=True)
class Published:
    """A model of a published family in float32, without dropout, on full sentences.

    Contestants use AdamW and the mean cross entropy of the labels.

    Args:
        name: Name of the model and of its folder.
        model_class: Name of the class in `transformers`.
        sizes: Dict of fields of the config.
        kind: Training objective: `"causal"`, `"masked"` or `"seq2seq"`.
        rank: Rank of low-rank adapters of all kernels except for the head. Then only the adapters are
            trained. `0` trains the full model.
        vocab_size: Number of tokens in the vocabulary.
        batch_size: Number of sentences.
        length: Number of tokens of a sentence, on each side.
    """

    name: str
    model_class: str
    sizes: dict
    kind: str = "causal"
    rank: int = 0
    vocab_size: int = 8000
    batch_size: int = 8
    length: int = 128

    @property
    def tokens(self):
        """Number of tokens in a step, on both sides."""
        return self.batch_size * self.length * (2 if self.kind == "seq2seq" else 1)

    @property
    def folder(self):
        """Folder of the common initial weights."""
        return pathlib.Path(os.environ[FOLDER]) / self.name

    @property
    def adapters(self):
        """Folder of the common initial adapters in the format of `peft`."""
        return self.folder / "adapters"

    def batch(self):
        """Return a dict of int64 arrays [batch_size, length].

        The keys are `labels`, and `tokens`, or `source` and `target`.
        """
        rng, shape = np.random.default_rng(0), (self.batch_size, self.length)
        tokens, source = rng.integers(4, self.vocab_size, (2, *shape))
        next_tokens = np.concatenate(
            [tokens[:, 1:], np.full((self.batch_size, 1), IGNORED)], axis=1
        )
        if self.kind == "causal":
            return {"tokens": tokens, "labels": next_tokens}
        if self.kind == "seq2seq":
            shifted = np.concatenate([np.full((self.batch_size, 1), PAD), tokens[:, :-1]], axis=1)
            return {"source": source, "target": shifted, "labels": tokens}
        is_masked = rng.random(shape) < 0.15
        return {
            "tokens": np.where(is_masked, MASK, tokens),
            "labels": np.where(is_masked, tokens, IGNORED),
        }


_DEFAULTS = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8}
_DEFAULTS |= {"max_position_embeddings": 128}
_GROUPED = {**_DEFAULTS, "num_key_value_heads": 4, "intermediate_size": 704}
_LLAMA = "LlamaForCausalLM", _GROUPED
_GPT2 = {"n_embd": 256, "n_layer": 4, "n_head": 8, "n_positions": 128}
_T5 = {"d_model": 256, "d_kv": 32, "d_ff": 1024, "num_layers": 4, "num_heads": 8}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 512}
PUBLISHED = {
    work.name: work
    for work in (
        Published("llama", *_LLAMA),
        Published(
            "gpt2",
            "GPT2LMHeadModel",
            {**_GPT2, "resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0},
        ),
        Published(
            "bert",
            "BertForMaskedLM",
            {**_DEFAULTS, "intermediate_size": 1024}
            | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
            kind="masked",
        ),
        Published(
            "t5",
            "T5ForConditionalGeneration",
            {**_T5, "dropout_rate": 0.0, "decoder_start_token_id": PAD},
            kind="seq2seq",
        ),
        Published("mixtral", "MixtralForCausalLM", {**_GROUPED, **_EXPERTS}),
        Published("qwen3", "Qwen3ForCausalLM", {**_GROUPED, "head_dim": 32}),
        Published("llama_lora", *_LLAMA, rank=16),
    )
}
