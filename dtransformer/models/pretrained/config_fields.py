"""Fields of published configs that no network is made of: what says nothing, and what does."""

import os
import warnings

from dtransformer.errors import InputError, shown
from dtransformer.models.generation import rules as generation_rules
from dtransformer.models.pretrained.quantized import form_of

# Fields that say nothing of what a network computes, or in which order alone.
SILENT = {
    *("model_type", "architectures", "transformers_version", "_name_or_path", "dtype"),
    *("torch_dtype", "auto_map", "tokenizer_class", "task_specific_params", "finetuning_task"),
    *("is_encoder_decoder", "use_cache", "return_dict", "output_attentions", "output_past"),
    *("output_hidden_states", "torchscript", "chunk_size_feed_forward", "gradient_checkpointing"),
    *("attn_implementation", "_attn_implementation_autoset", "pretraining_tp", "use_bfloat16"),
    *("reorder_and_upcast_attn", "max_window_layers", "n_ctx", "model_max_length", "prefix"),
    # Of how weights begin, and of heads that are none of these networks'.
    *(
        "initializer_range",
        "initializer_factor",
        "init_std",
        "classifier_dropout",
        "classif_dropout",
    ),
    *("id2label", "label2id", "num_labels", "_num_labels", "problem_type", "num_hidden_layers"),
    *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"),
    *("summary_first_dropout", "pooler_fc_size", "pooler_num_attention_heads", "pooler_type"),
    *("pooler_num_fc_layers", "pooler_size_per_head", "directionality", "n_positions"),
    # Of gpt-oss, where other fields say the same.
    *("experts_per_token", "initial_context_length"),
    # Of DeepSeek's training, of which `transformers` has none either.
    *("aux_loss_alpha", "seq_aux", "ep_size"),
    # Of T5, where they follow from feed_forward_proj.
    *("dense_act_fn", "is_gated_act"),
    # Ids of tokens that a network does not ask for.
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id"),
    *("mask_token_id", "decoder_start_token_id", "vocab_size"),
    # Of blocks that predict several tokens, which are left out; and of Phi-3, where longrope asks.
    *("num_nextn_predict_layers", "original_max_position_embeddings", "output_router_logits"),
    # Of how tables begin, of heads for tasks, and of what saves work and changes no result.
    *("sinusoidal_pos_embds", "seq_classif_dropout", "qa_dropout", "initializer_cutoff_factor"),
    *("classifier_pooling", "deterministic_flash_attn", "sparse_pred_ignore_index"),
    *("sparse_prediction", "reference_compile", "repad_logits_with_grad"),
    # Of Llama, where rope_parameters say it; and of those that have no windows.
    *(
        "extra_pos_embeddings",
        "rope_theta",
        "rope_scaling",
        "partial_rotary_factor",
        "sliding_window",
    ),
}
# What only training does, and is not done here.
_TRAINING = {"encoder_layerdrop", "decoder_layerdrop", "layerdrop", "activation_dropout"}
_REFUSED = {"quantization_config", "pruned_heads", "sparsity_config", "compression_config"}
_GENERATION = generation_rules.TAKEN | generation_rules.NAMED | generation_rules.SILENT
KNOWN = SILENT | _TRAINING | _REFUSED | _GENERATION


class ReadFields(dict):
    """The fields of a config, which remembers those that were asked for.

    Attributes:
        read: their names, the last one at the end, keys of a dict.
    """

    def __init__(self, fields: dict):
        super().__init__(fields)
        self.read = {}

    def __getitem__(self, name):
        self.read[name] = None
        return super().__getitem__(name)

    def get(self, name, default=None):
        """Return a field, or a default where it lacks."""
        self.read[name] = None
        return super().get(name, default)


def check_others(config: ReadFields, path: os.PathLike) -> None:
    """Refuse, or name in a warning, what a network was not made of and may have to be.

    Args:
        config: the fields, after the network's arguments were read.
        path: of the file, for messages.

    Raises:
        InputError: there is a field by which weights are others.
    """
    known = {"quantization_config"} if form_of(dict(config)) else set()
    left = {x: y for x, y in config.items() if x not in config.read.keys() | known and y}
    for name in sorted(left.keys() & _REFUSED):
        raise InputError(f"{name}={shown(left[name])} is not built: give the weights as they were")
    if training := sorted(left.keys() & _TRAINING):
        message = ", ".join(f"{name}={shown(left[name])}" for name in training)
        warnings.warn(f"{path}: {message}: not applied where the network is trained", stacklevel=3)
    if others := sorted(left.keys() - KNOWN):
        message = ", ".join(f"{name}={shown(left[name])}" for name in others)
        warnings.warn(
            f"{path}: fields that are not known here, and ignored: {message}", stacklevel=3
        )
