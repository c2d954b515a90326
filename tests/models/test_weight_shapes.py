"""Weight shapes are known before any weight is created and match the built weights."""

import pytest

from dtransformer import MoEConfig, parallel_config
from dtransformer.models import CausalLM, EncoderDecoderLM, MaskedLM, TranslationTransformer

SIZES = {"hidden_size": 16, "num_heads": 4, "ffn_hidden_size": 40, "num_layers": 2}
LLAMA = {
    "positions": "rotary",
    "norm": "rms_norm",
    "gated": True,
    "use_bias": False,
    "num_kv_heads": 2,
    "head_dim": 6,
    "tied_head": False,
}
PRE = {"post_layernorm_residual": False, "tied_head": False, "gated": True}
BLOCKS = {"hidden_size": 16, "num_heads": 4, "encoder_layers": 1, "decoder_layers": 2}
DEEP_SEEK = MoEConfig(expert_num=4, router_type="sigmoid", shared_experts=2)
GEMMA = {"norm": "rms_norm_unit_offset", "norm_placement": "sandwich", "qk_norm": "rms_norm"}
OLMO = {"norm_placement": "output", "qk_norm": "rms_norm_all_heads"}
SMALL_EXPERTS = MoEConfig(expert_num=4, num_experts_chosen=2, ffn_hidden_size=9, shared_experts=1)
NETWORKS = {
    "gemma": lambda: CausalLM(23, **SIZES, **{**LLAMA, **GEMMA}),
    "olmo": lambda: CausalLM(23, **SIZES, **LLAMA, **OLMO),
    "neox": lambda: CausalLM(23, **SIZES, norm_placement="parallel"),
    "falcon": lambda: CausalLM(23, **SIZES, **LLAMA, norm_placement="parallel_one_norm"),
    "apertus": lambda: CausalLM(23, **SIZES, hidden_act="xielu"),
    "nemotron": lambda: CausalLM(23, **SIZES, norm="layer_norm_unit_offset", hidden_act="relu2"),
    "dense_first": lambda: CausalLM(
        23, **SIZES, moe_config=SMALL_EXPERTS, block_pattern=[{"experts": False}, {}]
    ),
    "no_first_norm": lambda: CausalLM(
        23,
        **SIZES,
        norm="layer_norm_without_beta",
        block_pattern=[{"attention_norm": False}, {"window": 3}],
    ),
    "gpt2": lambda: CausalLM(23, **SIZES, max_length=12),
    "sinusoidal": lambda: CausalLM(23, **SIZES, positions="sinusoidal", head_bias=True),
    "post": lambda: CausalLM(23, **SIZES, post_layernorm_residual=True),
    "llama": lambda: CausalLM(23, **SIZES, **LLAMA),
    "qwen2": lambda: CausalLM(23, **SIZES, **LLAMA, qkv_bias=True),
    "qk_norm": lambda: CausalLM(23, **SIZES, **LLAMA, qk_norm="rms_norm"),
    "alibi": lambda: CausalLM(23, **SIZES, positions="alibi", qk_norm="layer_norm"),
    "experts": lambda: CausalLM(23, **SIZES, moe_config=MoEConfig(expert_num=3), moe_every=2),
    "shared_experts": lambda: CausalLM(23, **SIZES, **LLAMA, moe_config=DEEP_SEEK),
    "gated": lambda: CausalLM(23, **SIZES, gated=True, qkv_bias=False),
    "bert": lambda: MaskedLM(23, **SIZES, next_sentence=True),
    "roberta": lambda: MaskedLM(23, **SIZES, num_token_types=1, position_offset=2),
    "untied": lambda: MaskedLM(23, **SIZES, tied_head=False, post_layernorm_residual=False),
    "translation": lambda: TranslationTransformer(23, target_vocab_size=19, **BLOCKS),
    "shared": lambda: TranslationTransformer(
        23, shared_embeddings=True, tied_head=True, positions="learned", **BLOCKS
    ),
    "translation_experts": lambda: TranslationTransformer(23, moe_config=DEEP_SEEK, **BLOCKS),
    "bert_experts": lambda: MaskedLM(23, **SIZES, moe_config=DEEP_SEEK),
    "t5_experts": lambda: EncoderDecoderLM(23, **PRE, **BLOCKS, moe_config=DEEP_SEEK),
    "bart": lambda: EncoderDecoderLM(
        23, embedding_norm=True, position_offset=2, head_bias=True, **BLOCKS
    ),
    "t5": lambda: EncoderDecoderLM(
        23, positions="relative", use_bias=False, norm="rms_norm", head_dim=6, **PRE, **BLOCKS
    ),
    "marian": lambda: EncoderDecoderLM(23, positions="sinusoidal_paper", **BLOCKS),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_weight_shapes_match_built_weights(name):
    network = NETWORKS[name]()
    shapes = network.weight_shapes()
    assert not network.weights
    network.build()
    built = {x.path.removeprefix(f"{network.name}/"): tuple(x.shape) for x in network.variables}
    assert shapes == built
    assert network.num_parameters() == network.count_params()


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "translation"])
def test_weight_shapes_exclude_padding(name):
    expected = NETWORKS[name]().weight_shapes()
    with parallel_config(model_parallel=2):
        network = NETWORKS[name]()
        network.build()
        assert network.weight_shapes() == expected
        assert network.count_params() > network.num_parameters()
