"""Named small networks and their optimizers. They are the same under every layout."""

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
    quantize,
)
from dtransformer.trainers import Muon
from harness import block_networks

VOCAB_SIZE = 60
_INDIVISIBLE_SIZE = 61  # Vocabulary size that no axis divides.
# Adam normalizes gradients even if they are rounding noise, see docs/parity.md.
EPSILON = 1e-6
_SIZES = {"hidden_size": 32, "num_heads": 8, "ffn_hidden_size": 64}


def translation_model(vocab_size=VOCAB_SIZE, **options):
    """Return an encoder-decoder, by default with one block per stack and without dropout."""
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
    """Two vocabularies, a head with a bias, and pre-norm blocks."""
    model = translation_model(
        _INDIVISIBLE_SIZE, target_vocab_size=59, head_bias=True, **_SIZES, **options
    )
    return model, keras.optimizers.AdamW(1e-3, weight_decay=0.1, epsilon=epsilon)


def tied(epsilon, **options):
    """One table for source, target and head, post-norm blocks, and clipping."""
    model = translation_model(
        _INDIVISIBLE_SIZE,
        shared_embeddings=True,
        tied_head=True,
        positions="learned",
        post_layernorm_residual=True,
        **_SIZES,
        **options,
    )
    return model, _clipped_adamw(epsilon)


def adamw(epsilon, **options):
    """Like `untied`, with clipping by global norm and weights without decay."""
    return _without_decay(_clipped_adamw(epsilon), **options)


def sgd(_, **options):
    """Like `adamw`, with momentum and clipping by each gradient's norm."""
    optimizer = keras.optimizers.SGD(0.03, momentum=0.9, weight_decay=0.01, clipnorm=0.2)
    return _without_decay(optimizer, **options)


def lion(_, **options):
    """Like `adamw`. Lion moves all elements by the same amount."""
    optimizer = keras.optimizers.Lion(3e-4, weight_decay=0.1, global_clipnorm=0.5)
    return _without_decay(optimizer, **options)


def lamb(epsilon, **options):
    """Like `adamw`. LAMB scales the update of each weight by its norm."""
    optimizer = keras.optimizers.Lamb(1e-3, weight_decay=0.1, epsilon=epsilon, global_clipnorm=0.5)
    return _without_decay(optimizer, **options)


def adafactor(epsilon, **options):
    """Like `adamw`, with row and column statistics and clipping by each gradient's norm."""
    optimizer = keras.optimizers.Adafactor(
        1e-3, weight_decay=0.1, epsilon_1=epsilon**2, clipnorm=0.2
    )
    return _without_decay(optimizer, **options)


def muon(epsilon, **options):
    """Like `adamw`. Muon orthogonalizes the momenta of matrices."""
    optimizer = Muon(
        1e-3, weight_decay=0.1, adam_weight_decay=0.1, epsilon=epsilon, global_clipnorm=0.5
    )
    return _without_decay(optimizer, **options)


def dropout(epsilon, **options):
    """Like `tied`, with dropout.

    ReLU would amplify rounding differences at its kink, so the activation is GELU.
    """
    return tied(epsilon, dropout_rate=0.1, hidden_act="gelu", **options)


def packed(epsilon, **options):
    """Like `tied`, with two consecutive sentence pairs in each row."""
    return tied(epsilon, **options)


def causal(epsilon, encoder_layers, decoder_layers):
    """A tied language model."""
    num_layers = encoder_layers + decoder_layers
    model = CausalLM(_INDIVISIBLE_SIZE, num_layers=num_layers, dropout_rate=0.0, **_SIZES)
    return model, _clipped_adamw(epsilon)


def long(epsilon, **options):
    """Like `tied`, with sequence lengths that context parallelism divides."""
    return tied(epsilon, **options)


def long_dropout(epsilon, **options):
    """Like `dropout`, with sequence lengths that context parallelism divides."""
    return dropout(epsilon, **options)


def long_causal(epsilon, **blocks):
    """Like `causal`, with sequence lengths that context parallelism divides."""
    return causal(epsilon, **blocks)


def llama(epsilon, encoder_layers, decoder_layers, **options):
    """A language model with Llama's blocks: grouped heads, rotary positions, a gate, a window."""
    model = CausalLM(
        _INDIVISIBLE_SIZE,
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
        **{**_SIZES, **options},
    )
    return model, _clipped_adamw(epsilon)


def moe(epsilon, encoder_layers, decoder_layers, **options):
    """A language model with experts in every second block, which drop some tokens."""
    moe = {
        "expert_num": 4,
        "num_experts_chosen": 2,
        "capacity_factor": 1.0,
        "expert_group_size": 8,
        "z_loss_factor": 1e-2,
        **options,
    }
    model = CausalLM(
        _INDIVISIBLE_SIZE,
        num_layers=encoder_layers + decoder_layers,
        dropout_rate=0.0,
        moe_config=MoEConfig(**moe),
        moe_every=2,
        **_SIZES,
    )
    return model, _clipped_adamw(epsilon)


def long_moe(epsilon, **blocks):
    """Like `moe`, with sequence lengths that context parallelism divides."""
    return moe(epsilon, **blocks)


def moe_global(epsilon, **blocks):
    """Like `moe`, with one token group for the batch and DeepSeek's router."""
    options = {"router_type": "sigmoid", "routing_groups": 2, "routing_groups_chosen": 1}
    options |= {"expert_group_size": None, "shared_experts": 1}
    return moe(epsilon, **options, **blocks)


def bert(epsilon, encoder_layers, decoder_layers, **options):
    """An encoder like BERT, trained on masked tokens."""
    num_layers = encoder_layers + decoder_layers
    model = MaskedLM(
        _INDIVISIBLE_SIZE, num_layers=num_layers, dropout_rate=0.0, **_SIZES, **options
    )
    return model, _clipped_adamw(epsilon)


def sentences(epsilon, **options):
    """Like `bert`, with a second loss for next-sentence prediction."""
    return bert(epsilon, next_sentence=True, **options)


def bart(epsilon, **options):
    """An encoder–decoder like BART. Targets start with the padding id, as in Marian."""
    model = EncoderDecoderLM(
        _INDIVISIBLE_SIZE,
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
    """An encoder–decoder like T5 with a gate: relative positions, tied and scaled."""
    model = EncoderDecoderLM(
        _INDIVISIBLE_SIZE,
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
    """Like `llama`, with adapters on all kernels, partly DoRA. Only adapters are trained."""
    model, optimizer = llama(epsilon, **blocks)
    model.build()
    add_lora(model, rank=4, alpha=32, targets="*feed_forward/*kernel")
    add_lora(model, rank=4, alpha=32, targets=["*attention/*kernel", "head/*"], kind="dora")
    return model, optimizer


def llama_qlora(epsilon, **blocks):
    """Like `llama_lora`, with kernels in NF4, except for the keys' kernels."""
    model, optimizer = llama(epsilon, hidden_size=64, **blocks)
    with quantize("nf4", ["*feed_forward/*kernel", "*attention/(query|value|output)_kernel"]):
        model.build()
    add_lora(model, rank=4, alpha=32, targets="*feed_forward/*kernel")
    add_lora(model, rank=4, alpha=32, targets="*attention/*kernel", kind="dora")
    return model, optimizer


def llama_frozen(epsilon, **blocks):
    """Like `llama`. Everything before the third block, a pipeline's first stages, is frozen."""
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


def _network_maker(make):
    """Return a function that creates a network of `block_networks` and its optimizer."""

    def make_network(epsilon, encoder_layers, decoder_layers):
        return make(_INDIVISIBLE_SIZE, encoder_layers + decoder_layers), _clipped_adamw(epsilon)

    return make_network


FORMS = {**block_networks.DECODERS, **block_networks.ENCODERS}
# These networks also have a variant whose sequences context parallelism divides.
FORMS |= {f"long_{name}": FORMS[name] for name in ("olmo", "gpt_oss", "deepseek")}
# Deep networks have at least four blocks, for pipeline stages with several chunks. Others have two.
DEEP_NETWORKS = {
    **{f"deep_{name}": _network_maker(make) for name, make in FORMS.items()},
    "deep": adamw,
    "deep_tied": tied,
    "deep_dropout": dropout,
    "deep_packed": packed,
    "deep_causal": causal,
    "deep_long": long,
    "deep_long_dropout": long_dropout,
    "deep_long_causal": long_causal,
    "deep_long_moe": long_moe,
    "deep_llama": llama,
    "deep_llama_lora": llama_lora,
    "deep_llama_qlora": llama_qlora,
    "deep_llama_frozen": llama_frozen,
    "deep_moe": moe,
    "deep_moe_global": moe_global,
    "deep_bert": bert,
    "deep_masked": bert,
    "deep_long_masked": bert,
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
# Networks with batches in two shapes, so that two functions are compiled.
IN_TWO_SHAPES = ("untied", "deep_tied")


def get_kind(network):
    """Return the name of a network without the prefix "deep_"."""
    return network.removeprefix("deep_")


def make_loss(network):
    """Return the loss for training a network."""
    tokens = CrossEntropyLoss(0.1, ignore_id=0)
    if get_kind(network) != "sentences":
        return tokens
    return {"masked_lm": tokens, "next_sentence": CrossEntropyLoss()}


def make(network, epsilon=EPSILON, num_blocks=4):
    """Return a network and its optimizer.

    Args:
        network: Name of the network.
        epsilon: AdamW's epsilon.
        num_blocks: Number of blocks of deep networks. Other networks have two.
    """
    num_blocks = num_blocks if network in DEEP_NETWORKS else 2
    blocks = {"encoder_layers": num_blocks // 2, "decoder_layers": num_blocks - num_blocks // 2}
    return NETWORKS[network](epsilon, **blocks)
