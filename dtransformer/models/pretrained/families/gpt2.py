"""GPT-2 and OPT: decoders with learned positions.

Reference:
    - Radford et al., 2019, "Language models are unsupervised multitask learners"
    - [Zhang et al., 2022, OPT](https://arxiv.org/abs/2205.01068)
"""

from dtransformer.models.pretrained.families.family import SIZES, Family, FileNames
from dtransformer.models.pretrained.families.keys import (
    TIED,
    Key,
    hidden_act,
    layer_norm_epsilon,
    replace_rows,
)
from dtransformer.models.pretrained.families.parallel import CLASSIC
from dtransformer.models.pretrained.families.weights import (
    QUERY_KEY_VALUE,
    Weights,
    blocks,
    products,
)

GPT2 = Family(
    "GPT2LMHeadModel",
    keys=(
        Key("n_embd", "hidden_size"),
        Key("n_head", "num_heads"),
        Key("n_layer", "num_layers"),
        Key("n_positions", "max_length"),
        Key("n_inner", "ffn_hidden_size", lambda config: 4 * config["n_embd"]),
        layer_norm_epsilon(1e-5, "layer_norm_epsilon"),
        Key("resid_pdrop", "dropout_rate", 0.1),
        Key("attn_pdrop", "attention_dropout_rate", 0.1),
        Key("embd_pdrop", "embedding_dropout_rate", 0.1),
        TIED,
        hidden_act("activation_function", "gelu_new"),
    ),
    weights={
        "wte.weight": "embedding/table",
        "wpe.weight": "positions/table",
        "ln_f": "blocks/final_norm",
        "lm_head": "head",
        **blocks(
            "h.{i}.",
            {
                "ln_1": "attention_norm",
                "ln_2": "feed_forward_norm",
                "attn.c_attn": Weights(QUERY_KEY_VALUE, "inputs_first"),
                "attn.c_proj": Weights(("attention/output",), "inputs_first"),
                "mlp.c_fc": Weights(("feed_forward/mapping",), "inputs_first"),
                "mlp.c_proj": Weights(("feed_forward/projection",), "inputs_first"),
            },
        ),
    },
    fixed={**CLASSIC, "positions": "learned"},
    supported_values={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    ids={"bos_token_id": 50256, "eos_token_id": 50256},
    files=FileNames(prefix="transformer.", ignored=(".attn.bias", ".attn.masked_bias")),
)
OPT = Family(
    "OPTForCausalLM",
    keys=replace_rows(
        SIZES,
        Key("hidden_size", "hidden_size", equal_keys=("word_embed_proj_dim",)),
        Key("ffn_dim", "ffn_hidden_size"),
        Key("dropout", "dropout_rate", 0.1),
        Key("attention_dropout", "attention_dropout_rate", 0.0),
        TIED,
        Key("enable_bias", "use_bias", True, same=("qkv_bias",)),
        hidden_act("activation_function", "relu"),
    ),
    weights={
        "decoder.embed_tokens.weight": "embedding/table",
        "decoder.embed_positions.weight": "positions/table",
        "decoder.final_layer_norm": "blocks/final_norm",
        "lm_head": "head",
        **blocks(
            "decoder.layers.{i}.",
            {"self_attn_layer_norm": "attention_norm", "final_layer_norm": "feed_forward_norm"},
            products("self_attn.{}_proj", *"qkv", "out"),
            {"fc1": "feed_forward/mapping", "fc2": "feed_forward/projection"},
        ),
    },
    fixed={**CLASSIC, "positions": "learned", "position_offset": 2, "embedding_dropout_rate": 0.0},
    supported_values={
        "do_layer_norm_before": True,
        "_remove_final_layer_norm": False,
        "layer_norm_elementwise_affine": True,
        "layerdrop": 0.0,
    },
    ids={"bos_token_id": 2, "eos_token_id": 2, "pad_token_id": 1},
    files=FileNames(prefix="model."),
)
