"""Keys of run configs: sections of each task, and types, defaults and descriptions of their keys.

The comment after a field is its description in docs, `dtransformer new` and `dtransformer schema`.
"""

import dataclasses
from typing import Annotated, Literal

import pydantic
from pydantic import BeforeValidator, Field

from dtransformer.parallel.config.config import TransformerOpParallelConfig
from dtransformer.planner.job import PRECISIONS
from dtransformer.preference_losses import PREFERENCE_LOSSES
from dtransformer.runs.nested_options import make_dataclass, make_list
from dtransformer.runs.network_options import NetworkOptions, TranslationModel
from dtransformer.runs.value_types import (
    Count,
    Epochs,
    Name,
    NotNegative,
    Number,
    Path,
    Pieces,
    Positive,
    Rate,
    Ratio,
    Share,
    Small,
    run_options,
)

DEFAULT_VOCAB_SIZE = 8000  # maximum entries of a trained tokenizer


@run_options
class Source:
    """File of records, or folder of token shards, with its weight in a mixture."""

    path: Path = ""  # File or folder to read
    target: Path | None = None  # File with the target texts, line by line (seq2seq)
    weight: Positive | None = None  # Relative frequency in a mixture


Precision = Literal[PRECISIONS]
Algorithm = Literal["byte_bpe", "wordpiece"]
Mixture = Literal["repeat", "once", "first_ends"]
Turns = Literal["assistant", "last_assistant", "all"]
PreferenceKind = Literal[PREFERENCE_LOSSES]
Divergence = Literal["forward_kl", "reverse_kl"]
Schedule = Literal["inverse_sqrt", "linear", "cosine", "constant", "wsd", "restarts"]
Sources = Annotated[tuple[pydantic.InstanceOf[Source], ...], make_list(Source, "path")]


@run_options
class TranslationData:
    """Sentence pairs and batching."""

    source: Path | None = None  # Source text, one sentence per line; may be .gz
    target: Path | None = None  # Translations, line by line
    dev_source: Path | None = None  # Held-out source text, for val_loss and BLEU
    dev_target: Path | None = None  # Translations of dev_source
    max_length: Count = 128  # Maximum tokens per sentence; longer training pairs are dropped
    max_ratio: Ratio | None = None  # Drop pairs whose word counts differ by more than this factor
    distinct: bool = False  # Drop repeated pairs
    batch_tokens: Count | None = 4096  # Tokens per global batch and side, with padding
    batch_size: Count | None = None  # Sentences per global batch, instead of batch_tokens
    num_buckets: Small = 8  # Number of length buckets
    packed_length: Count | None = None  # Tokens per packed row; replaces buckets
    shuffle: bool = True  # Shuffle in every epoch


@run_options
class DocumentData:
    """Documents and the rows made from them."""

    train: Sources = ()  # Text or record files, or folders from `prepare --lm`, with weights
    dev: Sources = ()  # Held-out documents, for val_loss and perplexity
    field: Name = "text"  # Key or column of the text in records
    documents: Literal["blank_line", "line", "file"] = "blank_line"  # End of each document
    sentences: bool = False  # Treat lines as sentences, for next_sentence
    length: Count = 512  # Tokens per row
    mask_rate: Rate = 0.15  # Fraction of tokens to predict
    all_positions: bool = False  # Compute logits at all positions, not only at masked ones
    mean_span: Ratio = 3.0  # Mean tokens per span
    shuffle: bool = True  # Shuffle in every epoch


@run_options
class RecordData:
    """Records and the rows made from them."""

    train: Sources = ()  # Files: .jsonl, .json, .parquet, .arrow or text; JSON and text may be .gz
    dev: Sources = ()  # Held-out records
    fields: dict[Name, Name] = dataclasses.field(default_factory=dict)  # Names: {prompt: question}
    length: Count = 512  # Maximum tokens per record, and tokens per row
    longer: Literal["leave_out", "cut"] = "leave_out"  # leave_out or cut longer training records
    packed: bool = False  # Pack several records into a row, without attention between them
    mixture: Mixture = "once"  # Epoch of a mixture: repeat, once or first_ends
    shuffle: bool = True  # Shuffle in every epoch


@run_options
class Seq2SeqData(RecordData):
    """Source and target texts."""

    prefix: str = ""  # Text before each source, such as "summarize: "


@run_options
class ChatData(RecordData):
    """Conversations, texts or pairs of answers, and their chat template."""

    train_on: Turns = "assistant"  # Turns in the loss: assistant, last_assistant or all
    template: Path | None = None  # Jinja file, or chatml; null uses the tokenizer's template
    date: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d$")] = "2024-07-26"  # Today's date


@run_options
class LabelData(RecordData):
    """Texts with labels."""

    labels: list[Name] = dataclasses.field(default_factory=list)  # Labels; [] for the records'
    pooling: Literal["first", "mean", "last"] | None = None  # Default: first, or last in decoders


@run_options
class TokenizerOptions:
    """Subword tokenizer of all texts."""

    folder: Path | None = None  # Tokenizer to use; null: model.from's tokenizer, or train one
    vocab_size: Pieces | None = None  # Entries of a trained tokenizer; null: up to 8000
    lower_case: bool = False  # Convert texts to lower case
    algorithm: Algorithm | None = None  # wordpiece or byte_bpe; null: depends on the task


@run_options
class GuardOptions:
    """Steps to skip because their gradient norm is unusual."""

    skip_spikes: Annotated[float, Field(gt=1)] = 8.0  # Skip norms above this multiple of the median
    stop_after: Count = 5  # Stop after this number of skipped steps in a row


Guard = Annotated[
    pydantic.InstanceOf[GuardOptions] | None, BeforeValidator(make_dataclass(GuardOptions))
]


@run_options
class GroupOptions:
    """Weights with a different learning rate or weight decay."""

    pattern: Name | list[Name] = ""  # Path pattern, or a list of patterns
    learning_rate_factor: NotNegative = 1.0  # Factor on the schedule's learning rate
    weight_decay: NotNegative | None = None  # Replaces training.weight_decay
    adamw: bool = False  # Update matrices with AdamW, if the optimizer is muon


Groups = Annotated[
    tuple[pydantic.InstanceOf[GroupOptions], ...], make_list(GroupOptions, "pattern")
]


@run_options
class MuonOptions:
    """Options of the optimizer muon."""

    momentum: Rate = 0.95  # Decay rate of the momentum of matrices
    rms_rate: Positive | None = 0.2  # RMS of matrix updates; null: scale of Jordan et al.
    adam_lr_ratio: NotNegative = 1.0  # AdamW's learning rate divided by training.learning_rate


Muon = Annotated[
    pydantic.InstanceOf[MuonOptions] | None, BeforeValidator(make_dataclass(MuonOptions))
]


@run_options
class OptimizerOptions:
    """Length of training, optimizer, schedule and loss."""

    epochs: Epochs = 10  # Total epochs, including epochs before a resume
    max_steps: Count | None = None  # Stop after this total number of steps
    max_minutes: NotNegative | None = None  # Stop after the first step beyond this time
    optimizer: Name = "adamw"  # muon, or name of a Keras optimizer
    learning_rate: NotNegative = 1e-3  # Peak learning rate, after the warm-up
    schedule: Schedule = "inverse_sqrt"  # inverse_sqrt, linear, cosine, constant, wsd or restarts
    warmup_steps: Number = 400  # Steps of linear warm-up from 0
    decay_steps: Count | None = None  # Length of wsd's final decay; null: a tenth of all steps
    restarts: Count = 1  # Number of restarts of the cosine, for schedule restarts
    final_learning_rate: NotNegative = 0.0  # Final rate of linear, cosine, wsd and restarts
    weight_decay: NotNegative = 0.01  # Weight decay; norms and biases do not decay
    beta_2: Rate = 0.98  # Decay rate of Adam's second moment
    clip_norm: NotNegative | None = 1.0  # Maximum global gradient norm; null disables
    label_smoothing: Rate = 0.1  # Probability spread over all other tokens
    z_loss: Rate = 0.0  # Factor on logsumexp² of the logits in the loss, such as 1e-4
    chunk_tokens: Literal["auto"] | Count | None = "auto"  # Tokens per chunk of logits
    ema: Rate = 0.0  # Momentum of averaged weights, used for evaluation and export
    guard: Guard = None  # {skip_spikes: 8.0, stop_after: 5}; null disables
    log_gradient_norms: bool = False  # Also log the gradient norm of each block and other layer
    groups: Groups = ()  # [{pattern: …, learning_rate_factor: …, weight_decay: …}]
    muon: Muon = None  # {momentum: …, rms_rate: …, adam_lr_ratio: …} of the optimizer muon


@run_options
class ComputeOptions:
    """Precision, compilation, devices and seed."""

    precision: Precision = "float32"  # float32, mixed_bfloat16, mixed_float16 or bfloat16
    jit_compile: Literal["auto"] | bool = "auto"  # Compile with XLA: auto, true or false
    steps_per_execution: Annotated[int, Field(ge=1, le=10**4)] = 1  # Steps per compiled call
    local_devices: Annotated[int, Field(ge=1, le=128)] = 1  # Devices per rank
    deterministic: bool = False  # Use deterministic operations, slower on GPUs
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0  # Seed of weights, dropout and shuffling


@run_options
class CheckpointOptions:
    """Checkpoints, early stopping and the choice of the layout."""

    checkpoint_steps: Number = 0  # Steps between checkpoints; 0: one per epoch
    checkpoint_minutes: NotNegative = 0  # Minutes between checkpoints; 0 disables
    keep_checkpoints: Count = 2  # Newest checkpoints to keep; the best by val_loss also stays
    early_stopping: Number = 0  # Stop after n epochs without a better val_loss; 0 disables
    bleu_sentences: Number = 200  # Dev sentences to translate after every epoch; 0 disables
    layout: Literal["given", "auto"] = "given"  # auto: chosen by the planner


@run_options
class TrainingOptions(CheckpointOptions, ComputeOptions, OptimizerOptions):
    """Optimizer, schedule, precision and checkpoints."""


@run_options
class NetworkTraining(TrainingOptions):
    """Optimizer, schedule, precision and checkpoints."""

    neftune_alpha: NotNegative = 0.0  # Noise on embeddings in training, such as 5
    batch_size: Count = 32  # Rows per global batch
    epochs: Epochs = 1  # Total epochs, including epochs before a resume
    learning_rate: NotNegative = 2e-4  # Peak learning rate, after the warm-up
    schedule: Schedule = "cosine"  # inverse_sqrt, linear, cosine, constant, wsd or restarts
    warmup_steps: Number = 0  # Steps of linear warm-up from 0
    beta_2: Rate = 0.95  # Decay rate of Adam's second moment
    label_smoothing: Rate = 0.0  # Probability spread over all other tokens


@run_options
class PreferenceTraining(NetworkTraining):
    """Training on pairs of answers (DPO, IPO, SimPO, ORPO)."""

    loss: PreferenceKind = "sigmoid"  # sigmoid, sigmoid_norm, hinge, ipo, simpo or orpo
    beta: Positive = 0.1  # Factor of the margin; of the odds ratio for orpo
    smoothing: Share = 0.0  # Assumed fraction of mislabelled pairs, for sigmoid and simpo
    simpo_gamma: NotNegative = 0.5  # Target margin of simpo
    reference_free: bool = False  # Compare the answers without a reference model


@run_options
class KTOTraining(NetworkTraining):
    """Training on single answers with a label (KTO)."""

    beta: Positive = 0.1  # Strength of the pull towards the reference model
    desirable_weight: Positive = 1.0  # Weight of answers with label true
    undesirable_weight: Positive = 1.0  # Weight of answers with label false


@run_options
class RewardTraining(NetworkTraining):
    """Training of a reward model."""

    center_rewards: NotNegative | None = None  # Factor on (chosen + rejected reward)² in the loss


@run_options
class EmbeddingTraining(NetworkTraining):
    """Contrastive training of text vectors."""

    temperature: Positive = 0.05  # Divisor of similarities
    matryoshka: list[Count] = dataclasses.field(default_factory=list)  # Train the first n features


@run_options
class SearchOptions:
    """Search for translations."""

    beam_size: Small = 4  # Number of hypotheses; 1 is greedy search
    length_penalty: Annotated[float, Field(ge=0, le=100)] = 0.6  # Exponent of the length penalty
    max_length: Count | None = None  # Maximum tokens; null: depends on the source


@run_options
class EvaluationOptions:
    """Evaluation during training."""

    every_steps: Count | None = None  # Also evaluate data.dev and show samples every n steps
    samples: list[str] = dataclasses.field(default_factory=list)  # Prompts, run after each epoch
    max_new_tokens: Count = 32  # Maximum tokens per sample


@run_options
class LogOptions:
    """Logs in addition to metrics.jsonl."""

    csv: bool = False  # Write epochs to a CSV file in the run folder
    tensorboard: bool = False  # Write TensorBoard logs to the run folder
    wandb: Name | None = None  # Weights & Biases project; WANDB_MODE=offline also works
    mlflow: Name | None = None  # MLflow experiment at MLFLOW_TRACKING_URI


@run_options
class ExportOptions:
    """Exports at the end of training."""

    folder: Path | None = None  # Folder to write, for generate and transformers
    family: Name | None = None  # Family, such as gpt2; null uses the family of model.from
    saved_model: Path | None = None  # TensorFlow SavedModel to write, for serving
    merge_adapters: bool = True  # Merge adapters into the weights; false exports adapters only
    dtype: Literal["float32", "bfloat16", "float16"] | None = None  # Type; null: as loaded


@run_options
class DistillationOptions:
    """Knowledge distillation: learn from the logits of a frozen teacher."""

    teacher: Path | None = None  # Published folder or run folder with the run's tokenizer
    temperature: Positive = 2.0  # Divisor of the logits of teacher and student
    hard_loss_weight: Rate = 0.5  # Weight of the labels; the rest is the teacher's
    divergence: Divergence = "forward_kl"  # forward_kl, or reverse_kl for KL(student, teacher)


_TOKENIZED = {
    "tokenizer": TokenizerOptions,
    "model": NetworkOptions,
    "training": NetworkTraining,
    "parallel": TransformerOpParallelConfig,
    "evaluation": EvaluationOptions,
    "logs": LogOptions,
    "export": ExportOptions,
}
_DISTILLED = {**_TOKENIZED, "distillation": DistillationOptions}
_DOCUMENTS = {"data": DocumentData, **_DISTILLED}
_LABELS = {"data": LabelData, **_TOKENIZED}
# Classes of the sections of each task, in the order of saved configs.
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
    "causal_lm": _DOCUMENTS,
    "masked_lm": _DOCUMENTS,
    "next_sentence": {"data": DocumentData, **_TOKENIZED},
    "span_corruption": _DOCUMENTS,
    "chat": {"data": ChatData, **_DISTILLED},
    "preference": {"data": ChatData, **_TOKENIZED, "training": PreferenceTraining},
    "kto": {"data": ChatData, **_TOKENIZED, "training": KTOTraining},
    "reward": {"data": ChatData, **_TOKENIZED, "training": RewardTraining},
    **dict.fromkeys(("classification", "token_classification", "regression", "ranking"), _LABELS),
    "embedding": {"data": LabelData, **_TOKENIZED, "training": EmbeddingTraining},
    "seq2seq": {"data": Seq2SeqData, **_DISTILLED},
}
