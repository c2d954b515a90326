"""BERT and RoBERTa.

References: Devlin et al., 2019, "BERT", arXiv 1810.04805; Liu et al., 2019, "RoBERTa", arXiv
1907.11692.
"""

import functools

from dtransformer.errors import InputError
from dtransformer.models.masked_lm import MaskedLM
from dtransformer.models.pretrained.families.family import (
    Family,
    activation,
    bias,
    dense,
    norm,
    of_blocks,
    published_activation,
    read,
    refuse,
    require,
    table,
    written,
)

_PRETRAINING = "BertForPreTraining"
# Our arguments -> fields of configs, and what they are where a config says nothing.
_FIELDS = {
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_layers": "num_hidden_layers",
    "ffn_hidden_size": "intermediate_size",
    "max_length": "max_position_embeddings",
    "num_token_types": "type_vocab_size",
    "norm_epsilon": "layer_norm_eps",
    "dropout_rate": "hidden_dropout_prob",
    "attention_dropout_rate": "attention_probs_dropout_prob",
}
_USUAL = {
    "num_token_types": 2,
    "norm_epsilon": 1e-12,
    "dropout_rate": 0.1,
    "attention_dropout_rate": 0.1,
}


def _arguments(config, name="BERT"):
    refuse(
        config,
        name,
        position_embedding_type="absolute",
        is_decoder=False,
        add_cross_attention=False,
        tie_word_embeddings=True,
    )
    return {
        **read(config, _FIELDS, **_USUAL),
        "hidden_act": activation(config.get("hidden_act", "gelu")),
        "next_sentence": _PRETRAINING in (config.get("architectures") or ()),
    }


def _roberta_arguments(config):
    refuse(config, "RoBERTa", hidden_act="gelu")  # of its head, whatever that of its blocks is
    if config["pad_token_id"] is None:
        raise InputError("pad_token_id is null, and RoBERTa's positions are counted from it on")
    found, offset = _arguments(config, "RoBERTa"), config["pad_token_id"] + 1
    own = {"position_offset": offset, "max_length": found["max_length"] - offset}
    return {**found, **own, "next_sentence": False}


def _config(arguments):
    always = {"embedding_scale": 1.0, "post_layernorm_residual": True, "tied_head": True}
    require(arguments, **always, moe_config=None)
    found = {
        **written(arguments, _FIELDS),
        "max_position_embeddings": arguments["max_length"] + arguments["position_offset"],
        "hidden_act": published_activation(arguments),
    }
    return {**found, "architectures": [_PRETRAINING]} if arguments["next_sentence"] else found


def _bert_config(arguments):
    require(arguments, position_offset=0)
    return _config(arguments)


def _roberta_config(arguments):
    pad_id = arguments["pad_id"]
    offset = None if pad_id is None else pad_id + 1
    require(arguments, next_sentence=False, position_offset=offset, hidden_act="gelu")
    return _config(arguments)


def _block(prefix, number):
    theirs, ours = f"{prefix}.encoder.layer.{number}.", f"blocks/block_{number}/"
    attention = f"{theirs}attention."
    return [
        *(
            tensor
            for name in ("query", "key", "value")
            for tensor in dense(f"{attention}self.{name}", f"{ours}attention/{name}_")
        ),
        *dense(f"{attention}output.dense", f"{ours}attention/output_", num_inputs=2),
        *norm(f"{attention}output.LayerNorm", f"{ours}attention_norm"),
        *dense(f"{theirs}intermediate.dense", f"{ours}feed_forward/mapping_"),
        *dense(f"{theirs}output.dense", f"{ours}feed_forward/projection_"),
        *norm(f"{theirs}output.LayerNorm", f"{ours}feed_forward_norm"),
    ]


def _encoder(prefix, arguments):
    """Return the tensors of the embeddings and the blocks."""
    embeddings = f"{prefix}.embeddings."
    return [
        table(f"{embeddings}word_embeddings.weight", "embedding/table"),
        table(f"{embeddings}position_embeddings.weight", "positions/table"),
        table(f"{embeddings}token_type_embeddings.weight", "token_types/table"),
        *norm(f"{embeddings}LayerNorm", "embedding_norm"),
        *of_blocks(arguments["num_layers"], functools.partial(_block, prefix)),
    ]


def _bert_tensors(arguments):
    head = "cls.predictions."
    sentences = [
        *dense("bert.pooler.dense", "sentence_head/pooler/"),
        *dense("cls.seq_relationship", "sentence_head/classifier/"),
    ]
    return [
        *_encoder("bert", arguments),
        *dense(f"{head}transform.dense", "head/dense/"),
        *norm(f"{head}transform.LayerNorm", "head/norm"),
        bias(f"{head}bias", "head/logits/bias"),
        *(sentences if arguments["next_sentence"] else []),
    ]


def _roberta_tensors(arguments):
    return [
        *_encoder("roberta", arguments),
        *dense("lm_head.dense", "head/dense/"),
        *norm("lm_head.layer_norm", "head/norm"),
        bias("lm_head.bias", "head/logits/bias"),
    ]


# Files of Google's weights are of the time when norms had other names; and models that find masked
# tokens may have what tells next sentences, too.
_POOLER = "pooler.dense.weight", "pooler.dense.bias"
_OTHERS = {
    "special_ids": {"pad_id": "pad_token_id"},
    "usual_ids": {"pad_token_id": 0},
    "renamed": {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
}
BERT = Family(
    "BertForMaskedLM",
    MaskedLM,
    _arguments,
    _bert_config,
    _bert_tensors,
    copies=("cls.predictions.decoder.weight", "cls.predictions.decoder.bias"),
    ignored=("position_ids", *_POOLER, "seq_relationship.weight", "seq_relationship.bias"),
    **_OTHERS,
)
ROBERTA = Family(
    "RobertaForMaskedLM",
    MaskedLM,
    _roberta_arguments,
    _roberta_config,
    _roberta_tensors,
    copies=("lm_head.decoder.weight", "lm_head.decoder.bias"),
    ignored=("position_ids", *_POOLER),
    **_OTHERS,
)
