"""GPT-NeoX, Phi, Falcon and Command R: parallel attention and feed-forward layers.

Reference:
    - [Black et al., 2022, GPT-NeoX-20B, §2.1](https://arxiv.org/abs/2204.06745)
    - [Biderman et al., 2023, Pythia](https://arxiv.org/abs/2304.01373)
    - [Li et al., 2023, phi-1.5](https://arxiv.org/abs/2309.05463)
    - [Almazrouei et al., 2023, Falcon](https://arxiv.org/abs/2311.16867)
    - Command R and R7B: their published code
"""

from collections.abc import Mapping

from dtransformer.errors import InputError
from dtransformer.models.pretrained.families import paths
from dtransformer.models.pretrained.families.blocks import Blocks, every
from dtransformer.models.pretrained.families.family import Family, llama_parts_without
from dtransformer.models.pretrained.families.parts import TIED, Field, differs, epsilon, hidden_act

# Arguments of GPT-2 and its direct successors.
CLASSIC = {"norm": "layer_norm", "gated": False, "use_bias": True, "qkv_bias": True}
_EPSILON = epsilon(1e-5, "layer_norm_eps", none_value=1e-5)
_DENSE = {"mlp.dense_h_to_4h": paths.MAPPING, "mlp.dense_4h_to_h": paths.PROJECTION}
_ONE_NORM = "parallel_one_norm"


def parallel_residual(default: bool, placement: str) -> Field:
    """Return the `Field` of parallel attention and feed-forward layers.

    Args:
        default: Default of a config without the key.
        placement: Norm placement of parallel blocks, from `block_forms.PLACEMENTS`.
    """

    def to_argument(value):
        return placement if value else None

    to_config = {placement: True, None: False, "pre": False}.get
    return Field("norm_placement", "use_parallel_residual", default, to_argument, to_config)


GPT_NEOX = Family(
    "GPTNeoXForCausalLM",
    parts=(
        _EPSILON,
        hidden_act(default="gelu"),
        Blocks(fraction=0.25, fields=("rotary_emb_base", "rotary_pct")),
        Field("dropout_rate", "hidden_dropout", 0.0, same=("embedding_dropout_rate",)),
        parallel_residual(True, "parallel"),
    ),
    default_parts=llama_parts_without("num_kv_heads", "head_dim"),
    fixed=CLASSIC,
    supported_values={"attention_bias": True, "is_decoder": False},
    ids={"bos_token_id": 0, "eos_token_id": 2},
    attention={"attention.query_key_value": paths.QUERY_KEY_VALUE, "attention.dense": paths.OUTPUT},
    dense=_DENSE,
    is_grouped=True,
    block="gpt_neox.layers.{}.",
    tables={"gpt_neox.embed_in.weight": "embedding/table"},
    top={"gpt_neox.final_layer_norm": "blocks/final_norm", "embed_out": "head"},
    copies=("embed_out.weight",),
    renamed={"lm_head.weight": "embed_out.weight"},
    ignored=("attention.bias", "attention.masked_bias", "rotary_emb.inv_freq"),
)
PHI = Family(
    "PhiForCausalLM",
    parts=(
        _EPSILON,
        hidden_act(default="gelu_new"),
        Blocks(fraction=0.5),
        Field("dropout_rate", "resid_pdrop", 0.0),
        Field("embedding_dropout_rate", "embd_pdrop", 0.0),
    ),
    fixed={**CLASSIC, "norm_placement": _ONE_NORM, "head_bias": True},
    supported_values={"qk_layernorm": False},
    ids={"bos_token_id": 1, "eos_token_id": 2},
    attention=paths.attention("self_attn.{}", "q_proj", "k_proj", "v_proj", "dense"),
    dense={"mlp.fc1": paths.MAPPING, "mlp.fc2": paths.PROJECTION},
    top={"model.final_layernorm": "blocks/final_norm", "lm_head": "head"},
)


def _slides(config, index):
    """Return the kind of a block of Command R7B. By default every fourth block is full."""
    if config.get("sliding_window", 4096) is None:
        raise InputError(
            "`sliding_window=null` (blocks without positions) is not supported for Cohere 2."
        )
    return every(config.get("sliding_window_pattern") or 4)(config, index)


_COHERE = {
    "fixed": {"norm": "layer_norm_without_beta", "norm_placement": _ONE_NORM},
    "ids": {"bos_token_id": 5, "eos_token_id": 255001, "pad_token_id": 0},
    "is_interleaved": True,
}
_COHERE_PARTS = _EPSILON, TIED, Field("logits_scale", "logit_scale", 0.0625)
COHERE = Family(
    "CohereForCausalLM",
    parts=(*_COHERE_PARTS, Blocks(base=5e5)),
    supported_values={"attention_bias": False, "use_qk_norm": False},
    **_COHERE,
)
COHERE2 = Family(
    "Cohere2ForCausalLM",
    parts=(
        *_COHERE_PARTS,
        Blocks(kind_rule=_slides, window=4096, has_types=True, full_has_rotary=False),
    ),
    supported_values={"attention_bias": False},
    **_COHERE,
)


class _FalconHeads:
    """Mapping of Falcon's key and value heads and norms."""

    arguments = "num_kv_heads", "norm_placement"

    def from_hf(self, config: Mapping) -> dict:
        """Return the arguments from a config; see `Part`."""
        heads = config.get("num_kv_heads")
        is_multi_query = config.get("multi_query", True)
        has_two = config.get("num_ln_in_parallel_attn") != 1
        if not config.get("new_decoder_architecture"):
            heads = 1 if is_multi_query else None
            has_two = False
        return {
            "num_kv_heads": heads or config["num_attention_heads"],
            "norm_placement": "parallel" if has_two else _ONE_NORM,
        }

    def to_hf(self, arguments: Mapping) -> dict:
        """Return the config fields from network arguments; see `Part`.

        Raises:
            InputError: If the blocks are not parallel.
        """
        placement = arguments["norm_placement"]
        norms = {_ONE_NORM: 1, "parallel": 2}.get(placement)
        if norms is None:
            raise differs("norm_placement", repr(placement), "'parallel'")
        heads = arguments["num_kv_heads"] or arguments["num_heads"]
        is_new = norms == 2 or heads not in (1, arguments["num_heads"])
        fields = {"num_kv_heads": heads, "num_ln_in_parallel_attn": norms} if is_new else {}
        return {"new_decoder_architecture": is_new, "multi_query": heads == 1, **fields}


def _falcon_norms(arguments):
    has_two = arguments["norm_placement"] == "parallel"
    return {"ln_attn": "attention_norm", "ln_mlp": "feed_forward_norm"} if has_two else paths.PRE


FALCON = Family(
    "FalconForCausalLM",
    parts=(
        _FalconHeads(),
        epsilon(1e-5, "layer_norm_epsilon", none_value=1e-5),
        hidden_act("activation", "gelu"),
        TIED,
        Field("use_bias", "bias", False, same=("qkv_bias",)),
        Field(
            "ffn_hidden_size",
            "ffn_hidden_size",
            lambda config: 4 * config["hidden_size"],
            none_value=lambda arguments: 4 * arguments["hidden_size"],
        ),
        Field("max_length", "max_position_embeddings", 2048),
    ),
    default_parts=llama_parts_without("head_dim", "attention_dropout_rate"),
    fixed={"norm": "layer_norm", "gated": False, "attention_dropout_rate": 0.0},
    # Falcon applies dropout to the sum of both layers, and attention dropout only with ALiBi.
    supported_values={
        "alibi": False,
        "parallel_attn": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    },
    ids={"bos_token_id": 11, "eos_token_id": 11},
    attention={
        "self_attention.query_key_value": paths.QUERY_KEY_VALUE,
        "self_attention.dense": paths.OUTPUT,
    },
    dense=_DENSE,
    norms=_falcon_norms,
    is_grouped=True,
    block="transformer.h.{}.",
    tables={"transformer.word_embeddings.weight": "embedding/table"},
    top={"transformer.ln_f": "blocks/final_norm", "lm_head": "head"},
)
