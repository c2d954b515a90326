"""Mixtral: Llama's blocks with experts in place of the feed-forward layers.

Reference: Jiang et al., 2024, "Mixtral of experts", arXiv 2401.04088.
"""

from dtransformer.errors import InputError
from dtransformer.models.causal_lm import CausalLM
from dtransformer.models.experts import experts_of
from dtransformer.models.pretrained.families.family import (
    Family,
    linear,
    read,
    refuse,
    require,
    written,
)
from dtransformer.models.pretrained.families.llama import (
    SPARE,
    USUAL_IDS,
    attention_tensors,
    llama_arguments,
    llama_config,
    llama_tensors,
)
from dtransformer.parallel.config.config import MoEConfig

_FIELDS = {"expert_num": "num_local_experts", "num_experts_chosen": "num_experts_per_tok"}
_USUAL_AUX_LOSS_FACTOR = 0.001
# No token is dropped, and the load is balanced sequence by sequence.
_ALWAYS = {"dropless": True, "expert_group_size": 4096}


def _arguments(config):
    # There it multiplies what experts see, too.
    refuse(config, "Mixtral", router_jitter_noise=0.0)
    factor = config.get("router_aux_loss_coef", _USUAL_AUX_LOSS_FACTOR)
    # That is what the loss depends on there.
    factor = factor if config.get("output_router_logits") else 0.0
    moe = MoEConfig(**_ALWAYS, aux_loss_factor=factor, **read(config, _FIELDS))
    window = config.get("sliding_window")
    epsilon = config.get("rms_norm_eps", 1e-5)
    found = {**llama_arguments(config, 8, 1e6), "norm_epsilon": epsilon}
    return {**found, "window": window, "moe_config": moe}


def _config(arguments):
    require(arguments, qkv_bias=False, moe_every=1)
    moe = experts_of(arguments)
    if moe is None or not moe.dropless or moe.shared_experts or moe.router_type != "softmax":
        raise InputError(
            "Mixtral's blocks have experts with router_type='softmax', dropless=True and "
            f"shared_experts=0, the network has {moe}: it cannot be saved as one of that family"
        )
    return {
        **llama_config({**arguments, "moe_config": None}),
        "sliding_window": arguments["window"],
        **written(vars(moe), _FIELDS),
        "output_router_logits": moe.aux_loss_factor > 0,
        "router_aux_loss_coef": moe.aux_loss_factor or _USUAL_AUX_LOSS_FACTOR,
    }


def _block(number, arguments):
    theirs = f"model.layers.{number}.block_sparse_moe."
    ours = f"blocks/block_{number}/feed_forward/"
    kernels = {"w1": "gate", "w3": "mapping", "w2": "projection"}
    return [
        *attention_tensors(number, arguments),
        linear(f"{theirs}gate.weight", f"{ours}router/kernel"),
        *(
            linear(f"{theirs}experts.{i}.{x}.weight", f"{ours}{y}_kernel", expert=i)
            for i in range(experts_of(arguments).expert_num)
            for x, y in kernels.items()
        ),
    ]


def _tensors(arguments):
    if experts_of(arguments) is None:
        raise InputError("Mixtral's blocks have experts, and the network has none")
    return llama_tensors(arguments, _block)


MIXTRAL = Family(
    "MixtralForCausalLM",
    CausalLM,
    _arguments,
    _config,
    _tensors,
    usual_ids=USUAL_IDS,
    **SPARE,
)
