"""Contestant: dtransformer's `TranslationTransformer.generate`."""

import dtransformer  # noqa: F401  # isort: skip  (before TensorFlow, so that oneDNN is on)

import tensorflow as tf
from generation import END, PAD, START
from workloads import serve, time_each_step

from dtransformer.models import TranslationTransformer

# Our name -> common name.
_NAMES = {
    "attention": "self",
    "self_attention": "self",
    "cross_attention": "memory",
    "mapping": "inner",
    "projection": "outer",
}


def _common_name(path):
    """Return the common name of a weight from its path."""
    _, *places, weight = path.split("/")
    if weight == "table":
        common_names = {
            "source_positions": "encoder/positions",
            "target_positions": "decoder/positions",
        }
        return common_names.get(places[0], "table")
    if places[0] == "head":
        return "bias"
    _, stack, block, sublayer = places
    block = f"{stack}/{block.removeprefix('block_')}"
    if weight in ("gamma", "beta"):
        sublayer = sublayer.removesuffix("_norm")
        return f"{block}/{_NAMES.get(sublayer, 'outer')}/{weight}"
    part, kind = weight.split("_")
    return f"{block}/{_NAMES.get(part) or f'{_NAMES[sublayer]}/{part}'}/{kind}"


def make_run(workload):
    network = TranslationTransformer(
        workload.vocab_size,
        hidden_size=workload.hidden_size,
        num_heads=workload.num_heads,
        ffn_hidden_size=workload.ffn_hidden_size,
        encoder_layers=workload.encoder_layers,
        decoder_layers=workload.decoder_layers,
        hidden_act="relu",
        positions="learned",
        max_source_length=workload.num_new_tokens + 1,
        max_target_length=workload.num_new_tokens + 1,
        shared_embeddings=True,
        tied_head=True,
        head_bias=True,
        post_layernorm_residual=True,
        pad_id=PAD,
        start_id=START,
        end_id=END,
    )
    network.build()
    weights = workload.weights()
    for variable in network.variables:
        variable.assign(weights.pop(_common_name(variable.path)).reshape(variable.shape))
    assert not weights, list(weights)
    sources = tf.constant(workload.sources(), "int32")

    def generate():
        ids = network.generate(
            sources,
            beam_size=workload.num_beams,
            length_penalty=0.0,
            max_length=workload.num_new_tokens,
        )
        return ids.numpy().tolist()

    return time_each_step(generate)


if __name__ == "__main__":
    serve(make_run)
