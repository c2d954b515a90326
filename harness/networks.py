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
from harness import block_networks

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


def dropout(epsilon, **options):
    """As `tied`, with dropout: its masks depend on the number of micro-batches.

    GELU has no kink, where rounding would turn a unit off on one of two ways to add up.
    """
    return tied(epsilon, dropout_rate=0.1, hidden_act="gelu", **options)


def packed(epsilon, **options):
    """As `tied`; each row has two sentence pairs, one after the other."""
    return tied(epsilon, **options)


def causal(epsilon, encoder_layers, decoder_layers):
    """A language model, tied."""
    num_layers = encoder_layers + decoder_layers
    model = CausalLM(_UNDIVIDED, num_layers=num_layers, dropout_rate=0.0, **_SIZES)
    return model, _clipped_adamw(epsilon)


def long(epsilon, **options):
    """As `tied`, of sequences that shards of them divide."""
    return tied(epsilon, **options)


def long_causal(epsilon, **blocks):
    """As `causal`, of sequences that shards of them divide."""
    return causal(epsilon, **blocks)


def llama(epsilon, encoder_layers, decoder_layers):
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


def moe(epsilon, encoder_layers, decoder_layers, **options):
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


def long_moe(epsilon, **blocks):
    """As `moe`, of sequences that may be sharded."""
    return moe(epsilon, **blocks)


def moe_global(epsilon, **blocks):
    """As `moe`; all tokens of the batch share the experts' places, and the choice is DeepSeek's."""
    options = {"router_type": "sigmoid", "routing_groups": 2, "routing_groups_chosen": 1}
    options |= {"expert_group_size": None, "shared_experts": 1}
    return moe(epsilon, **options, **blocks)


def bert(epsilon, encoder_layers, decoder_layers, **options):
    """An encoder of BERT's form, of masked tokens."""
    num_layers = encoder_layers + decoder_layers
    model = MaskedLM(_UNDIVIDED, num_layers=num_layers, dropout_rate=0.0, **_SIZES, **options)
    return model, _clipped_adamw(epsilon)


def sentences(epsilon, **options):
    """As `bert`; whether a sentence follows another is a second loss."""
    return bert(epsilon, next_sentence=True, **options)


def bart(epsilon, **options):
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


def t5(epsilon, **options):
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


def llama_lora(epsilon, **blocks):
    """As `llama`; nothing but adapters of all kernels is trained, some with magnitudes."""
    model, optimizer = llama(epsilon, **blocks)
    model.build()
    add_lora(model, rank=4, alpha=32, targets="*feed_forward/*kernel")
    add_lora(model, rank=4, alpha=32, targets=["*attention/*kernel", "head/*"], kind="dora")
    return model, optimizer


def llama_frozen(epsilon, **blocks):
    """As `llama`; all before the third block, a pipeline's first stages, is frozen."""
    model, optimizer = llama(epsilon, **blocks)
    model.build()
    freeze(model, ["embedding/*", "blocks/block_[01]/*"])
    return model, optimizer


def _clipped_adamw(epsilon):
    return keras.optimizers.AdamW(1e-3, weight_decay=0.1, epsilon=epsilon, global_clipnorm=0.5)


def _without_decay(optimizer, **options):
    model, _ = untied(EPSILON, **options)
    optimizer.exclude_from_weight_decay(var_names=["bias", "gamma", "beta"])
    return model, optimizer


# With four blocks, as stages of several chunks need; without "deep_" they have two.
def _of_blocks(make):
    """Return a function that makes a network of `block_networks` and its optimizer."""

    def made(epsilon, encoder_layers, decoder_layers):
        return make(_UNDIVIDED, encoder_layers + decoder_layers), _clipped_adamw(epsilon)

    return made


FORMS = {**block_networks.DECODERS, **block_networks.ENCODERS}
# Those of sequences that shards of them divide, too.
FORMS |= {f"long_{name}": FORMS[name] for name in ("olmo", "gpt_oss", "deepseek")}
DEEP_NETWORKS = {
    **{f"deep_{name}": _of_blocks(make) for name, make in FORMS.items()},
    "deep": adamw,
    "deep_tied": tied,
    "deep_dropout": dropout,
    "deep_packed": packed,
    "deep_causal": causal,
    "deep_long": long,
    "deep_long_causal": long_causal,
    "deep_long_moe": long_moe,
    "deep_llama": llama,
    "deep_llama_lora": llama_lora,
    "deep_llama_frozen": llama_frozen,
    "deep_moe": moe,
    "deep_moe_global": moe_global,
    "deep_bert": bert,
    "deep_sentences": sentences,
    "deep_bart": bart,
    "deep_t5": t5,
    "deep_lamb": lamb,
}
NETWORKS = {
    "untied": untied,
    "adamw": adamw,
    "sgd": sgd,
    "lion": lion,
    "adafactor": adafactor,
    "muon": muon,
    **{name.removeprefix("deep_"): make for name, make in DEEP_NETWORKS.items() if name != "deep"},
    **DEEP_NETWORKS,
}
# Those whose batches come in two shapes, of which each is compiled.
IN_TWO_SHAPES = ("untied", "deep_tied")


def kind_of(network):
    """Return the name of a network without its depth."""
    return network.removeprefix("deep_")


def loss_of(network):
    """Return the loss that a network is trained with."""
    tokens = CrossEntropyLoss(0.1, ignore_id=0)
    if kind_of(network) != "sentences":
        return tokens
    return {"masked_lm": tokens, "next_sentence": CrossEntropyLoss()}


def make(network, epsilon=EPSILON, num_blocks=4):
    """Return a network and its optimizer.

    Args:
        network: its name.
        epsilon: AdamW's.
        num_blocks: of the deep networks.
    """
    num_blocks = num_blocks if network in DEEP_NETWORKS else 2
    blocks = {"encoder_layers": num_blocks // 2, "decoder_layers": num_blocks - num_blocks // 2}
    return NETWORKS[network](epsilon, **blocks)
