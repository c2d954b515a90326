"""Contestant: `generate` of a Marian model of Hugging Face `transformers` on PyTorch."""

import os

import torch
import transformers
from generation import END, PAD, START
from workloads import serve, time_each_step

# Common name -> name in Marian.
_SUBLAYERS = {"self": "self_attn", "memory": "encoder_attn", "outer": "final"}
_PARTS = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "out_proj"}


def _states(weights):
    """Return the weights with Marian's names. Kernels have shape [outputs, inputs]."""
    table = torch.from_numpy(weights.pop("table"))
    states = {"final_logits_bias": torch.from_numpy(weights.pop("bias"))[None]}
    names = ("model.shared", "model.encoder.embed_tokens", "model.decoder.embed_tokens", "lm_head")
    states.update({f"{name}.weight": table for name in names})
    for name, array in weights.items():
        stack, block, *rest = name.split("/")
        if block == "positions":
            states[f"model.{stack}.embed_positions.weight"] = torch.from_numpy(array)
            continue
        *places, kind = rest
        if kind in ("gamma", "beta"):
            place = f"{_SUBLAYERS[places[0]]}_layer_norm"
        elif len(places) == 1:
            place = {"inner": "fc1", "outer": "fc2"}[places[0]]
        else:
            place = f"{_SUBLAYERS[places[0]]}.{_PARTS[places[1]]}"
        suffix = "weight" if kind in ("gamma", "kernel") else "bias"
        states[f"model.{stack}.layers.{block}.{place}.{suffix}"] = torch.from_numpy(array.T.copy())
    return states


def make_run(workload):
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    transformers.logging.set_verbosity_error()
    config = transformers.MarianConfig(
        vocab_size=workload.vocab_size,
        d_model=workload.hidden_size,
        encoder_layers=workload.encoder_layers,
        decoder_layers=workload.decoder_layers,
        encoder_attention_heads=workload.num_heads,
        decoder_attention_heads=workload.num_heads,
        encoder_ffn_dim=workload.ffn_hidden_size,
        decoder_ffn_dim=workload.ffn_hidden_size,
        activation_function="relu",
        max_position_embeddings=workload.num_new_tokens + 1,
        scale_embedding=True,
        pad_token_id=PAD,
        bos_token_id=START,
        eos_token_id=END,
        decoder_start_token_id=START,
        forced_eos_token_id=None,
    )
    model = transformers.MarianMTModel(config).eval()
    model.load_state_dict(_states(workload.weights()))
    sources = torch.from_numpy(workload.sources())
    options = {"num_beams": workload.num_beams, "do_sample": False}
    if workload.num_beams > 1:
        options.update(length_penalty=0.0, early_stopping=False)

    @torch.inference_mode()
    def generate():
        ids = model.generate(
            input_ids=sources,
            attention_mask=(sources != PAD).long(),
            max_new_tokens=workload.num_new_tokens,
            **options,
        )
        return ids[:, 1:].tolist()

    return time_each_step(generate)


if __name__ == "__main__":
    serve(make_run)
