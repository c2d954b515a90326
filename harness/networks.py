"""Small networks and their optimizers, which are trained alike under every layout."""

import keras

from dtransformer import MoEConfig
from dtransformer.layers import CrossEntropyLoss
from dtransformer.models import (
    CausalLM,
    EncoderDecoderLM,
    MaskedLM,
    TranslationTransformer,
    add_lora,
    freeze,
)

VOCAB_SIZE = 60
_UNDIVIDED = 61  # a vocabulary that no axis divides
# Adam divides by the size of a gradient, even if that is rounding noise: docs/parity.md.
EPSILON = 1e-6
_SIZES = {"hidden_size": 32, "num_heads": 8, "ffn_hidden_size": 64}


def translation_model(vocab_size=VOCAB_SIZE, **options):
    """Return an encoder-decoder of one block each, without dropout, or as the options say."""
    return TranslationTransformer(
        vocab_size,
        **{
            "hidden_size": 16,
            "num_heads": 2,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "dropout_rate": 0.0,
            **options,
        },
    )


def untied(epsilon, **options):
    """Two vocabularies and a head with a bias; blocks that normalize first."""
    model = translation_model(_UNDIVIDED, target_vocab_size=59, head_bias=True, **_SIZES, **options)
    return model, keras.optimizers.AdamW(1e-3, weight_decay=0.1, epsilon=epsilon)


def tied(epsilon, **options):
    """One table for source, target and head; blocks that normalize last; clipping."""
    model = translation_model(
        _UNDIVIDED,
        shared_embeddings=True,
        tied_head=True,
        positions="learned",
        post_layernorm_residual=True,
        **_SIZES,
        **options,
    )
    return model, _clipped_adamw(epsilon)


def adamw(epsilon, **options):
    """As `untied`; clipped by the norm of all gradients, and some weights do not decay."""
    return _without_decay(_clipped_adamw(epsilon), **options)


def sgd(_, **options):
    """As `adamw`, with momentum; each gradient is clipped by its own norm."""
    optimizer = keras.optimizers.SGD(0.03, momentum=0.9, weight_decay=0.01, clipnorm=0.2)
    return _without_decay(optimizer, **options)


def lion(_, **options):
    """As `adamw`; moves every element alike."""
    optimizer = keras.optimizers.Lion(3e-4, weight_decay=0.1, global_clipnorm=0.5)
    return _without_decay(optimizer, **options)


def lamb(epsilon, **options):
    """As `adamw`; each weight moves by its own norm."""
    optimizer = keras.optimizers.Lamb(1e-3, weight_decay=0.1, epsilon=epsilon, global_clipnorm=0.5)
    return _without_decay(optimizer, **options)


def adafactor(epsilon, **options):
    """As `adamw`; its states are sums over rows and columns; each gradient is clipped by itself."""
    optimizer = keras.optimizers.Adafactor(
        1e-3, weight_decay=0.1, epsilon_1=epsilon**2, clipnorm=0.2
    )
    return _without_decay(optimizer, **options)


def muon(epsilon, **options):
    """As `adamw`; matrices move by their momenta made orthogonal, all but the biases."""
    optimizer = keras.optimizers.Muon(
        1e-3, weight_decay=0.1, epsilon=epsilon, clipvalue=0.01, exclude_layers=["bias"]
    )
    return _without_decay(optimizer, **options)


def deep_dropout(epsilon, **options):
    """As `tied`, with dropout: its masks depend on the number of micro-batches."""
    return tied(epsilon, dropout_rate=0.1, **options)


def deep_packed(epsilon, **options):
    """As `tied`; each row has two sentence pairs, one after the other."""
    return tied(epsilon, **options)


def deep_causal(epsilon, encoder_layers, decoder_layers):
    """A language model, tied."""
    num_layers = encoder_layers + decoder_layers
    model = CausalLM(_UNDIVIDED, num_layers=num_layers, dropout_rate=0.0, **_SIZES)
    return model, _clipped_adamw(epsilon)


def deep_long(epsilon, **options):
    """As `tied`, of sequences that shards of them divide."""
    return tied(epsilon, **options)


def deep_long_causal(epsilon, **blocks):
    """As `deep_causal`, of sequences that shards of them divide."""
    return deep_causal(epsilon, **blocks)


def deep_llama(epsilon, encoder_layers, decoder_layers):
    """A language model of Llama's form: grouped heads, rotary positions, a gate, a window."""
    model = CausalLM(
        _UNDIVIDED,
        num_layers=encoder_layers + decoder_layers,
        dropout_rate=0.0,
        hidden_act="silu",
        positions="rotary",
        tied_head=False,
        embedding_scale=1.0,
        norm="rms_norm",
        gated=True,
        use_bias=False,
        num_kv_heads=4,
        window=6,
        **_SIZES,
    )
    return model, _clipped_adamw(epsilon)


def deep_moe(epsilon, encoder_layers, decoder_layers, **options):
    """A language model whose second blocks have experts, which drop a part of the tokens."""
    moe = {
        "expert_num": 4,
        "num_experts_chosen": 2,
        "capacity_factor": 1.0,
        "expert_group_size": 8,
        "z_loss_factor": 1e-2,
        **options,
    }
    model = CausalLM(
        _UNDIVIDED,
        num_layers=encoder_layers + decoder_layers,
        dropout_rate=0.0,
        moe_config=MoEConfig(**moe),
        moe_every=2,
        **_SIZES,
    )
    return model, _clipped_adamw(epsilon)


def deep_long_moe(epsilon, **blocks):
    """As `deep_moe`, of sequences that may be sharded."""
    return deep_moe(epsilon, **blocks)


def deep_moe_global(epsilon, **blocks):
    """As `deep_moe`; all tokens of the batch share the experts' places, and the choice is DeepSeek's."""
    options = {"router_type": "sigmoid", "routing_groups": 2, "routing_groups_chosen": 1}
    options |= {"expert_group_size": None, "shared_experts": 1}
    return deep_moe(epsilon, **options, **blocks)


def deep_bert(epsilon, encoder_layers, decoder_layers, **options):
    """An encoder of BERT's form, of masked tokens."""
    num_layers = encoder_layers + decoder_layers
    model = MaskedLM(_UNDIVIDED, num_layers=num_layers, dropout_rate=0.0, **_SIZES, **options)
    return model, _clipped_adamw(epsilon)


def deep_sentences(epsilon, **options):
    """As `deep_bert`; whether a sentence follows another is a second loss."""
    return deep_bert(epsilon, next_sentence=True, **options)


def deep_bart(epsilon, **options):
    """An encoder–decoder of BART's form, that begins with the padding as Marian's do."""
    model = EncoderDecoderLM(
        _UNDIVIDED,
        dropout_rate=0.0,
        max_length=20,
        position_offset=2,
        embedding_norm=True,
        embedding_scale=None,
        head_bias=True,
        trains_head_bias=False,
        trains_padding=False,
        start_id=0,
        **_SIZES,
        **options,
    )
    return model, _clipped_adamw(epsilon)


def deep_t5(epsilon, **options):
    """An encoder–decoder of T5's form, with a gate: relative positions, tied and scaled."""
    model = EncoderDecoderLM(
        _UNDIVIDED,
        dropout_rate=0.0,
        positions="relative",
        relative_ranges=8,
        relative_max_distance=12,
        post_layernorm_residual=False,
        norm="rms_norm",
        gated=True,
        use_bias=False,
        query_scale=1.0,
        scales_output=True,
        start_id=0,
        **_SIZES,
        **options,
    )
    return model, _clipped_adamw(epsilon)


def deep_llama_lora(epsilon, **blocks):
    """As `deep_llama`, of which nothing but adapters of all kernels is trained."""
    model, optimizer = deep_llama(epsilon, **blocks)
    model.build()
    add_lora(model, rank=4, alpha=32, targets="*kernel")
    return model, optimizer


def deep_llama_frozen(epsilon, **blocks):
    """As `deep_llama`; all before the third block, a pipeline's first stages, is frozen."""
    model, optimizer = deep_llama(epsilon, **blocks)
    model.build()
    freeze(model, ["embedding/*", "blocks/block_[01]/*"])
    return model, optimizer


def _clipped_adamw(epsilon):
    return keras.optimizers.AdamW(1e-3, weight_decay=0.1, epsilon=epsilon, global_clipnorm=0.5)


def _without_decay(optimizer, **options):
    model, _ = untied(EPSILON, **options)
    optimizer.exclude_from_weight_decay(var_names=["bias", "gamma", "beta"])
    return model, optimizer


# Those for pipelines have more blocks.
DEEP_NETWORKS = {
    "deep": adamw,
    "deep_tied": tied,
    "deep_dropout": deep_dropout,
    "deep_packed": deep_packed,
    "deep_causal": deep_causal,
    "deep_long": deep_long,
    "deep_long_causal": deep_long_causal,
    "deep_long_moe": deep_long_moe,
    "deep_llama": deep_llama,
    "deep_llama_lora": deep_llama_lora,
    "deep_llama_frozen": deep_llama_frozen,
    "deep_moe": deep_moe,
    "deep_moe_global": deep_moe_global,
    "deep_bert": deep_bert,
    "deep_sentences": deep_sentences,
    "deep_bart": deep_bart,
    "deep_t5": deep_t5,
    "deep_lamb": lamb,
}
NETWORKS = {
    "untied": untied,
    "tied": tied,
    "adamw": adamw,
    "sgd": sgd,
    "lion": lion,
    "lamb": lamb,
    "adafactor": adafactor,
    "muon": muon,
    **DEEP_NETWORKS,
}


def loss_of(network):
    """Return the loss that a network is trained with."""
    tokens = CrossEntropyLoss(0.1, ignore_id=0)
    if network != "deep_sentences":
        return tokens
    return {"masked_lm": tokens, "next_sentence": CrossEntropyLoss()}


def make(network, epsilon=EPSILON, num_blocks=4):
    """Return a network and its optimizer.

    Args:
        network: its name.
        epsilon: AdamW's.
        num_blocks: of the networks for pipelines.
    """
    blocks = {"encoder_layers": num_blocks // 2, "decoder_layers": num_blocks - num_blocks // 2}
    return NETWORKS[network](epsilon, **(blocks if network in DEEP_NETWORKS else {}))
