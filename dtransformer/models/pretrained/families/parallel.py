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
from dtransformer.models.pretrained.families.blocks import Blocks, Rotary, Windows, periodic_kind
from dtransformer.models.pretrained.families.family import Family, FileNames, llama_keys
from dtransformer.models.pretrained.families.keys import (
    TIED,
    Key,
    hidden_act,
    layer_norm_epsilon,
    replace_rows,
    unsupported_argument,
)
from dtransformer.models.pretrained.families.weights import (
    NORMS,
    QUERY_KEY_VALUE,
    Table,
    Weights,
    blocks,
    products,
)

# Arguments of GPT-2 and its direct successors.
CLASSIC = {"norm": "layer_norm", "gated": False, "use_bias": True, "qkv_bias": True}
_FEED_FORWARD = {
    "mlp.dense_h_to_4h": "feed_forward/mapping",
    "mlp.dense_4h_to_h": "feed_forward/projection",
}
_ONE_NORM = "parallel_one_norm"


def parallel_residual(default: bool, placement: str) -> Key:
    """Return the row of parallel attention and feed-forward layers.

    Args:
        default: Default of a config without the key.
        placement: Norm placement of parallel blocks, from `block_forms.PLACEMENTS`.
    """

    def to_argument(value):
        return placement if value else None

    to_config = {placement: True, None: False, "pre": False}.get
    return Key("use_parallel_residual", "norm_placement", default, to_argument, to_config)


GPT_NEOX = Family(
    "GPTNeoXForCausalLM",
    keys=llama_keys(
        layer_norm_epsilon(1e-5),
        hidden_act(default="gelu"),
        Blocks(Rotary(fraction=0.25, base_key="rotary_emb_base", fraction_key="rotary_pct")),
        Key("hidden_dropout", "dropout_rate", 0.0, same=("embedding_dropout_rate",)),
        parallel_residual(True, "parallel"),
        without=("num_kv_heads", "head_dim"),
    ),
    weights={
        "gpt_neox.embed_in.weight": "embedding/table",
        "gpt_neox.final_layer_norm": "blocks/final_norm",
        "embed_out": "head",
        **blocks(
            "gpt_neox.layers.{i}.",
            NORMS,
            {
                "attention.query_key_value": Weights(QUERY_KEY_VALUE, "head_groups"),
                "attention.dense": "attention/output",
            },
            _FEED_FORWARD,
        ),
    },
    fixed=CLASSIC,
    supported_values={"attention_bias": True, "is_decoder": False},
    ids={"bos_token_id": 0, "eos_token_id": 2},
    files=FileNames(
        renamed={"lm_head.weight": "embed_out.weight"},
        ignored=("attention.bias", "attention.masked_bias", "rotary_emb.inv_freq"),
    ),
)
PHI = Family(
    "PhiForCausalLM",
    keys=llama_keys(
        layer_norm_epsilon(1e-5),
        hidden_act(default="gelu_new"),
        Blocks(Rotary(fraction=0.5)),
        Key("resid_pdrop", "dropout_rate", 0.0),
        Key("embd_pdrop", "embedding_dropout_rate", 0.0),
    ),
    weights={
        "model.embed_tokens.weight": "embedding/table",
        "model.final_layernorm": "blocks/final_norm",
        "lm_head": "head",
        **blocks(
            "model.layers.{i}.",
            NORMS,
            products("self_attn.{}", "q_proj", "k_proj", "v_proj", "dense"),
            {"mlp.fc1": "feed_forward/mapping", "mlp.fc2": "feed_forward/projection"},
        ),
    },
    fixed={**CLASSIC, "norm_placement": _ONE_NORM, "head_bias": True},
    supported_values={"qk_layernorm": False},
    ids={"bos_token_id": 1, "eos_token_id": 2},
)


class _Cohere2Windows(Windows):
    """Windows in all blocks except every fourth by default."""

    def default_kind(self, config: Mapping, index: int) -> str:
        """Return the kind of a block in a config without `layer_types`.

        Raises:
            InputError: If the config has no windows.
        """
        if config.get("sliding_window", 4096) is None:
            raise InputError(
                "`sliding_window=null` (blocks without positions) is not supported for Cohere 2."
            )
        return periodic_kind(index, config.get("sliding_window_pattern") or 4)


_COHERE = {
    "fixed": {"norm": "layer_norm_without_beta", "norm_placement": _ONE_NORM},
    "ids": {"bos_token_id": 5, "eos_token_id": 255001, "pad_token_id": 0},
    "is_interleaved": True,
}
_COHERE_KEYS = llama_keys(
    layer_norm_epsilon(1e-5),
    TIED,
    Key("logit_scale", "logits_scale", 0.0625),
    Blocks(Rotary(5e5)),
)
COHERE = Family(
    "CohereForCausalLM",
    keys=_COHERE_KEYS,
    supported_values={"attention_bias": False, "use_qk_norm": False},
    **_COHERE,
)
COHERE2 = Family(
    "Cohere2ForCausalLM",
    keys=replace_rows(
        _COHERE_KEYS,
        Blocks(windows=_Cohere2Windows(4096, has_layer_types=True, full_has_rotary=False)),
    ),
    supported_values={"attention_bias": False},
    **_COHERE,
)


class _FalconHeads:
    """Row of Falcon's key and value heads and norms."""

    arguments = "num_kv_heads", "norm_placement"

    def from_hf(self, config: Mapping) -> dict:
        """Return the arguments from a config; see `Row`."""
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
        """Return the config keys from network arguments; see `Row`.

        Raises:
            InputError: If the blocks are not parallel.
        """
        placement = arguments["norm_placement"]
        norms = {_ONE_NORM: 1, "parallel": 2}.get(placement)
        if norms is None:
            raise unsupported_argument("norm_placement", repr(placement), "'parallel'")
        heads = arguments["num_kv_heads"] or arguments["num_heads"]
        is_new = norms == 2 or heads not in (1, arguments["num_heads"])
        fields = {"num_kv_heads": heads, "num_ln_in_parallel_attn": norms} if is_new else {}
        return {"new_decoder_architecture": is_new, "multi_query": heads == 1, **fields}


def _four_times(sizes):
    return 4 * sizes["hidden_size"]


class _Falcon(Family):
    """Family whose norms have other names if a block has two."""

    def weight_names(self, arguments: Mapping) -> Table:
        """Return the table of weight names for a network's arguments."""
        norms = NORMS
        if arguments["norm_placement"] == "parallel":
            norms = {"ln_attn": "attention_norm", "ln_mlp": "feed_forward_norm"}
        return {**self.weights, **blocks("transformer.h.{i}.", norms)}


FALCON = _Falcon(
    "FalconForCausalLM",
    keys=llama_keys(
        _FalconHeads(),
        layer_norm_epsilon(1e-5, "layer_norm_epsilon"),
        hidden_act("activation", "gelu"),
        TIED,
        Key("bias", "use_bias", False, same=("qkv_bias",)),
        Key("ffn_hidden_size", "ffn_hidden_size", _four_times, unset=_four_times),
        Key("max_position_embeddings", "max_length", 2048),
        without=("head_dim", "attention_dropout_rate"),
    ),
    weights={
        "transformer.word_embeddings.weight": "embedding/table",
        "transformer.ln_f": "blocks/final_norm",
        "lm_head": "head",
        **blocks(
            "transformer.h.{i}.",
            {
                "self_attention.query_key_value": Weights(QUERY_KEY_VALUE, "head_groups"),
                "self_attention.dense": "attention/output",
            },
            _FEED_FORWARD,
        ),
    },
    fixed={"norm": "layer_norm", "gated": False, "attention_dropout_rate": 0.0},
    # Falcon applies dropout to the sum of both layers, and attention dropout only with ALiBi.
    supported_values={
        "alibi": False,
        "parallel_attn": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    },
    ids={"bos_token_id": 11, "eos_token_id": 11},
)
