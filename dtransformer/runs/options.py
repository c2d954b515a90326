"""Keys of a run's config: sections of each task (`SECTIONS`), allowed values and defaults."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import pydantic
from pydantic import BeforeValidator, Field

from dtransformer.inputs.json_file import STRICT, problem
from dtransformer.parallel.config.config import MoEConfig, TransformerOpParallelConfig
from dtransformer.planner.models import checked

USUAL_VOCABULARY = 8000  # pieces, where texts have so many

# What values may be; the greatest ones keep what is computed from them finite, `needs` tells of memory.
Count = Annotated[int, Field(ge=1, le=10**9)]
Number = Annotated[int, Field(ge=0, le=10**9)]
Size = Annotated[int, Field(ge=1, le=2**20)]
Pieces = Annotated[int, Field(ge=16, le=10**7)]
Layers = Annotated[int, Field(ge=1, le=200)]
Rate = Annotated[float, Field(ge=0, lt=1)]
Ratio = Annotated[float, Field(ge=1, le=1e9)]
NotNegative = Annotated[float, Field(ge=0, le=1e9)]
Positive = Annotated[float, Field(gt=0, le=1e9)]
Share = Annotated[float, Field(ge=0, lt=0.5)]
Path = Annotated[str, Field(min_length=1, max_length=4095)]
Name = Annotated[str, Field(min_length=1, max_length=100)]

_options = pydantic.dataclasses.dataclass(config={**STRICT, "validate_assignment": True})


def _made_of(kind: type) -> Callable:
    """Return a function that makes a dataclass of a mapping; other values are left to pydantic."""

    def make(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        try:
            return checked(kind, value)
        except pydantic.ValidationError as error:
            raise ValueError(" ".join(problem(error)).strip()) from None

    return make


def _each_of(kind: type, name: str) -> BeforeValidator:
    """Return what makes a tuple of dataclasses of mappings; a text stands for one with one field.

    Args:
        kind: the dataclass.
        name: the field, which has to be given.
    """
    make = _made_of(kind)

    def make_all(value: Any) -> Any:
        items = value if isinstance(value, Sequence) and not isinstance(value, str) else [value]
        found = [make({name: one} if isinstance(one, str) else one) for one in items]
        if value and not all(isinstance(x, kind) and getattr(x, name) for x in found):
            raise ValueError(f"must be a {name}, or a list of such or of {{{name}: …}}")
        return tuple(found) if value else ()

    return BeforeValidator(make_all)


@_options
class Source:
    """A file of records, or a folder of token shards, and its weight in a mixture."""

    path: Path = ""  # what is read
    target: Path | None = None  # line by line what a text of `path` becomes, for seq2seq
    weight: Positive | None = None  # of a mixture; shares are these, divided by their sum


Schedule = Literal["inverse_sqrt", "linear", "cosine", "constant", "wsd", "restarts"]
Sources = Annotated[tuple[pydantic.InstanceOf[Source], ...], _each_of(Source, "path")]


@_options
class TranslationData:
    """Where sentences come from, and how they are put into batches."""

    source: Path | None = None  # line-aligned: plain text, or as .gz
    target: Path | None = None  # line by line its translations
    dev_source: Path | None = None  # held-out sentences, for val_loss and BLEU
    dev_target: Path | None = None  # their translations
    max_length: Count = 128  # tokens of a sentence; longer pairs are left out of training
    max_ratio: Ratio | None = None  # pairs with more times the words on one side: left out too
    distinct: bool = False  # whether repeated pairs are left out too
    batch_tokens: Count | None = 4096  # tokens of one side of a global batch, padding included
    batch_size: Count | None = None  # or sentences of a global batch
    num_buckets: Annotated[int, Field(ge=1, le=1000)] = 8  # of lengths, within which batches are
    packed_length: Count | None = None  # tokens of rows that sentences are packed into, no buckets
    shuffle: bool = True  # anew in every epoch


@_options
class DocumentData:
    """Documents: text, and how it is put into rows."""

    train: Sources = ()  # files of text or records, or a folder that `prepare --lm` wrote
    dev: Sources = ()  # held-out documents, for val_loss and perplexity
    field: Name = "text"  # the key or column of records that has the text
    documents: Literal["blank_line", "line", "file"] = "blank_line"  # what ends one in a text file
    sentences: bool = False  # whether lines are sentences, which next_sentence needs
    length: Count = 512  # tokens of a row
    mask_rate: Rate = 0.15  # share of tokens that are asked for, of all tasks but causal_lm
    mean_span: Ratio = 3.0  # tokens of a span of span_corruption
    shuffle: bool = True  # anew in every epoch


Experts = Annotated[pydantic.InstanceOf[MoEConfig] | None, BeforeValidator(_made_of(MoEConfig))]
Names = dict[Name, Name]
Date = Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d$")]


@_options
class RecordData:
    """Records: files of examples, their form, and how they are put into rows."""

    train: Sources = ()  # .jsonl, .json, .parquet, .arrow or text; JSON and text may be packed, .gz
    dev: Sources = ()  # held-out records
    fields: Names = dataclasses.field(default_factory=dict)  # our name: the key in the files
    length: Count = 512  # most tokens of a record, and those of a row
    longer: Literal["leave_out", "cut"] = "leave_out"  # what becomes of longer records
    packed: bool = False  # several records in a row, kept apart in attention and positions
    mixture: Literal["repeat", "once", "first_ends"] = "once"  # what ends an epoch of several
    shuffle: bool = True  # anew in every epoch


@_options
class Seq2SeqData(RecordData):
    """Texts that become texts."""

    prefix: str = ""  # what each source begins with, such as "summarize: "


@_options
class ChatData(RecordData):
    """Conversations, texts, or pairs of answers; their template, and what of them is learnt."""

    train_on: Literal["assistant", "last_assistant", "all"] = "assistant"  # the turns to learn
    template: Path | None = None  # a Jinja file, or chatml; by default the tokenizer's own
    date: Date = "2024-07-26"  # what templates take for today


@_options
class LabelData(RecordData):
    """Texts with labels."""

    labels: list[Name] = dataclasses.field(default_factory=list)  # by default those of records
    pooling: Literal["first", "mean", "last"] | None = None  # first; last of decoders


@_options
class TokenizerOptions:
    """One subword vocabulary for all texts."""

    folder: Path | None = None  # a tokenizer that is there; by default that of `model.from`
    vocab_size: Pieces | None = None  # of one that is trained: 8000, or as many as the texts have
    lower_case: bool = False  # whether texts are made lower case
    algorithm: Literal["byte_bpe", "wordpiece"] | None = None  # byte_bpe for language models


@_options
class TranslationModel:
    """The arguments of `models.TranslationTransformer`."""

    hidden_size: Size = 256  # features of a token, h
    num_heads: Size = 8  # of attention, which divide h
    ffn_hidden_size: Size | None = None  # of feed-forward layers; 4 h by default
    encoder_layers: Layers = 4  # blocks
    decoder_layers: Layers = 4  # blocks
    dropout_rate: Rate = 0.1  # of residual branches; of the others where they are not given
    attention_dropout_rate: Rate | None = None  # of attention's weights
    embedding_dropout_rate: Rate | None = None  # of embeddings
    hidden_act: Name = "relu"  # the activation of feed-forward layers
    positions: Literal["sinusoidal", "learned"] = "sinusoidal"  # how positions are told
    shared_embeddings: bool = True  # one table for source and target
    tied_head: bool = True  # the head's kernel is the target's table
    head_bias: bool = False  # whether the head has a bias
    post_layernorm_residual: bool = False  # norms after residual sums, as published in 2017
    moe_config: Experts = None  # a mapping of its fields
    moe_every: Layers = 1  # which blocks have experts: every so many


@_options
class AdapterOptions:
    """Low-rank adapters of a model, which are trained in its place."""

    rank: Size = 8  # size between the factors
    alpha: Positive = 16.0  # the product of the factors is multiplied with alpha / rank
    targets: Name | list[Name] = "*attention/(query|value)_kernel"  # patterns of kernels' paths
    kind: Literal["lora", "dora"] = "lora"  # dora: magnitudes of a kernel's outputs, too
    dropout: Rate = 0.0  # the share of inputs that the factors do not see in training
    rslora: bool = False  # alpha / √rank in place of alpha / rank


Adapters = Annotated[
    pydantic.InstanceOf[AdapterOptions] | None, BeforeValidator(_made_of(AdapterOptions))
]


@_options
class NetworkOptions:
    """The model: published weights, a preset, another run, or sizes; keys not given are its own."""

    from_: Path | None = None  # a published folder, or another run's
    preset: Name | None = None  # a size of dtransformer.architectures, such as llama3_8b
    adapters: Adapters = None  # rank, alpha, targets; the rest is frozen then
    freeze: Name | list[Name] | None = None  # patterns of weights that are not trained
    hidden_size: Size | None = None  # features of a token, h
    num_heads: Size | None = None  # of attention, which divide h
    num_kv_heads: Size | None = None  # heads of keys and values
    head_dim: Size | None = None  # features of a head
    ffn_hidden_size: Size | None = None  # of feed-forward layers
    num_layers: Layers | None = None  # blocks of a single stack
    encoder_layers: Layers | None = None  # blocks of an encoder-decoder's encoder
    decoder_layers: Layers | None = None  # blocks of its decoder
    max_length: Count | None = None  # learned positions; by default data.length
    positions: Name | None = None  # learned, sinusoidal, rotary, alibi or relative
    dropout_rate: Rate | None = None  # of residual branches
    attention_dropout_rate: Rate | None = None  # of attention's weights
    embedding_dropout_rate: Rate | None = None  # of embeddings
    hidden_act: Name | None = None  # the activation of feed-forward layers
    embedding_scale: Positive | None = None  # what embeddings are multiplied with
    norm: Name | None = None  # layer_norm or rms_norm
    norm_epsilon: Positive | None = None  # what norms add to the variance
    gated: bool | None = None  # gated feed-forward layers
    use_bias: bool | None = None  # of products
    qkv_bias: bool | None = None  # of queries, keys and values
    qk_norm: Name | None = None  # a norm of queries and keys
    query_scale: Positive | None = None  # what scores are multiplied with
    soft_cap: Positive | None = None  # of scores
    rotary_base: Positive | None = None  # of rotary positions
    window: Count | None = None  # positions that each attends to
    tied_head: bool | None = None  # the head's kernel is the table of embeddings
    head_bias: bool | None = None  # whether the head has a bias
    post_layernorm_residual: bool | None = None  # norms after residual sums
    relative_ranges: Size | None = None  # of relative positions
    relative_max_distance: Size | None = None  # of relative positions
    moe_config: Experts = None  # a mapping of its fields
    moe_every: Layers | None = None  # which blocks have experts: every so many


@_options
class GroupOptions:
    """Weights that are updated in another way than the others."""

    pattern: Name | list[Name] = ""  # one or several of their paths
    learning_rate_factor: NotNegative = 1.0  # of the schedule's rate
    weight_decay: NotNegative | None = None  # in place of training.weight_decay


Groups = Annotated[tuple[pydantic.InstanceOf[GroupOptions], ...], _each_of(GroupOptions, "pattern")]


@_options
class TrainingOptions:
    """How the model is trained."""

    epochs: Annotated[int, Field(ge=1, le=10**6)] = 10  # from the run's beginning
    max_steps: Count | None = None  # stop after so many steps of the run
    max_minutes: NotNegative | None = None  # stop after the step that passes this
    optimizer: Name = "adamw"  # a Keras optimizer's name
    learning_rate: NotNegative = 1e-3  # the greatest, after the warm-up
    schedule: Schedule = "inverse_sqrt"  # inverse_sqrt, linear, cosine, constant, wsd or restarts
    warmup_steps: Number = 400  # in which the rate rises from 0
    decay_steps: Count | None = None  # of wsd: the last ones; a tenth of all by default
    restarts: Count = 1  # of restarts: how often the cosine begins anew
    final_learning_rate: NotNegative = 0.0  # the least, at the end of linear, cosine, wsd, restarts
    weight_decay: NotNegative = 0.01  # not on norms and biases
    beta_2: Rate = 0.98  # of Adam
    clip_norm: NotNegative | None = 1.0  # the greatest norm of all gradients
    label_smoothing: Rate = 0.1  # the share that other tokens have
    z_loss: Rate = 0.0  # factor of logsumexp² of the logits in the loss, such as 1e-4
    ema: Rate = 0.0  # momentum of averages of weights, which are evaluated, saved and exported
    groups: Groups = ()  # {pattern: …, learning_rate_factor: …, weight_decay: …}
    precision: Literal["float32", "mixed_bfloat16", "mixed_float16", "bfloat16"] = "float32"
    jit_compile: Literal["auto", True, False] = "auto"  # auto, true or false
    steps_per_execution: Annotated[int, Field(ge=1, le=10**4)] = 1  # steps of a call
    local_devices: Annotated[int, Field(ge=1, le=128)] = 1  # of each rank
    deterministic: bool = False  # the same bits each time, on GPUs by slower operations
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0  # of weights, dropout and shuffling
    checkpoint_steps: Number = 0  # steps between checkpoints; 0 for one checkpoint an epoch
    checkpoint_minutes: NotNegative = 0  # or the time between them
    keep_checkpoints: Count = 2  # the newest ones; the best by val_loss is kept in addition
    early_stopping: Number = 0  # epochs without a better val_loss after which to stop; 0 for never
    bleu_sentences: Number = 200  # of the dev set, translated after every epoch; 0 for none
    layout: Literal["given", "auto"] = "given"  # "auto", or `parallel: auto`: the planner's


@_options
class NetworkTraining(TrainingOptions):
    """How the model is trained."""

    neftune_alpha: NotNegative = 0.0  # noise of embeddings while training, such as 5
    batch_size: Count = 32  # rows of a global batch
    epochs: Annotated[int, Field(ge=1, le=10**6)] = 1  # from the run's beginning
    learning_rate: NotNegative = 2e-4  # the greatest, after the warm-up
    schedule: Schedule = "cosine"  # inverse_sqrt, linear, cosine, constant, wsd or restarts
    warmup_steps: Number = 0  # in which the rate rises from 0
    beta_2: Rate = 0.95  # of Adam
    label_smoothing: Rate = 0.0  # the share that other tokens have


@_options
class PreferenceTraining(NetworkTraining):
    """How the model is trained to prefer answers."""

    loss: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"  # of the margins between answers
    beta: Positive = 0.1  # how close to the reference the model stays
    smoothing: Share = 0.0  # the share of pairs that are labelled the wrong way round


@_options
class RewardTraining(NetworkTraining):
    """How the model is trained to rate answers."""

    center_rewards: NotNegative | None = None  # factor of (chosen + rejected reward)² in the loss


@_options
class EmbeddingTraining(NetworkTraining):
    """How the model is trained to tell texts that belong together."""

    temperature: Positive = 0.05  # what similarities are divided by


@_options
class SearchOptions:
    """How translations are searched for."""

    beam_size: Annotated[int, Field(ge=1, le=1000)] = 4  # hypotheses; 1 is greedy search
    length_penalty: Annotated[float, Field(ge=0, le=100)] = 0.6  # exponent of the length penalty
    max_length: Count | None = None  # tokens; by default by the source


@_options
class EvaluationOptions:
    """What is looked at while training goes on."""

    every_steps: Count | None = None  # evaluate data.dev, and show samples, so often besides
    samples: list[str] = dataclasses.field(default_factory=list)  # prompts, continued every epoch
    max_new_tokens: Count = 32  # of a sample


@_options
class LogOptions:
    """Logs besides metrics.jsonl, which each run writes."""

    csv: bool = False  # epochs, in the run's folder
    tensorboard: bool = False  # in the run's folder
    wandb: Name | None = None  # a project of Weights & Biases; WANDB_MODE=offline works, too
    mlflow: Name | None = None  # an experiment of MLflow, of MLFLOW_TRACKING_URI


@_options
class ExportOptions:
    """What is written when training has ended."""

    folder: Path | None = None  # a published folder, for generate and transformers
    family: Name | None = None  # its family, such as gpt2; by default that of `model.from`
    saved_model: Path | None = None  # a SavedModel of TensorFlow, with a signature, to be served
    merge_adapters: bool = True  # adapters are added to the weights; else they are written apart
    dtype: Literal["float32", "bfloat16", "float16"] | None = None  # of weights; default: as loaded


_TOKENIZED = {
    "tokenizer": TokenizerOptions,
    "model": NetworkOptions,
    "training": NetworkTraining,
    "parallel": TransformerOpParallelConfig,
    "evaluation": EvaluationOptions,
    "logs": LogOptions,
    "export": ExportOptions,
}
_DOCUMENTS = {"data": DocumentData, **_TOKENIZED}
_LABELS = {"data": LabelData, **_TOKENIZED}
# Task -> the classes of its sections, in the order in which they are written.
SECTIONS = {
    "translation": {
        "data": TranslationData,
        "tokenizer": TokenizerOptions,
        "model": TranslationModel,
        "training": TrainingOptions,
        "parallel": TransformerOpParallelConfig,
        "search": SearchOptions,
        "logs": LogOptions,
    },
    **dict.fromkeys(("causal_lm", "masked_lm", "next_sentence", "span_corruption"), _DOCUMENTS),
    "chat": {"data": ChatData, **_TOKENIZED},
    "preference": {"data": ChatData, **_TOKENIZED, "training": PreferenceTraining},
    "reward": {"data": ChatData, **_TOKENIZED, "training": RewardTraining},
    **dict.fromkeys(("classification", "token_classification", "regression"), _LABELS),
    "embedding": {"data": LabelData, **_TOKENIZED, "training": EmbeddingTraining},
    "seq2seq": {"data": Seq2SeqData, **_TOKENIZED},
}
