"""The config of a run: YAML files, `--set` options, and their checks."""

import dataclasses
import difflib
import os
import pathlib
import types
import typing
from collections.abc import Iterable

import yaml

from dtransformer.errors import InputError
from dtransformer.parallel.config import (
    TransformerOpParallelConfig,
    TransformerRecomputeConfig,
)


@dataclasses.dataclass
class DataOptions:
    """Where sentences come from, and how they are put into batches."""

    source: str | None = None  # line-aligned: .sgm, plain text, or either as .gz
    target: str | None = None
    dev_source: str | None = None
    dev_target: str | None = None
    max_length: int = 128  # tokens of a sentence; longer pairs are left out of training
    max_ratio: float | None = None  # pairs with more times the words on one side: left out too
    distinct: bool = False  # whether repeated pairs are left out too
    batch_tokens: int | None = 4096  # tokens of one side of a global batch, padding included
    batch_size: int | None = None  # or sentences of a global batch
    num_buckets: int = 8
    shuffle: bool = True


@dataclasses.dataclass
class TokenizerOptions:
    """One subword vocabulary for both languages."""

    vocab_size: int = 8000
    lower_case: bool = False


@dataclasses.dataclass
class ModelOptions:
    """The arguments of `models.TranslationTransformer`."""

    hidden_size: int = 256
    num_heads: int = 8
    ffn_hidden_size: int | None = None
    encoder_layers: int = 4
    decoder_layers: int = 4
    dropout_rate: float = 0.1
    attention_dropout_rate: float | None = None
    embedding_dropout_rate: float | None = None
    hidden_act: str = "relu"
    positions: str = "sinusoidal"
    shared_embeddings: bool = True
    tied_head: bool = True
    head_bias: bool = False
    post_layernorm_residual: bool = False


@dataclasses.dataclass
class TrainingOptions:
    """How the model is trained."""

    epochs: int = 10
    max_minutes: float | None = None  # stop after the step that passes this
    optimizer: str = "adamw"
    learning_rate: float = 1e-3
    schedule: str = "inverse_sqrt"  # inverse_sqrt, linear, cosine, constant
    warmup_steps: int = 400
    weight_decay: float = 0.01  # not on norms and biases
    beta_2: float = 0.98
    clip_norm: float | None = 1.0
    label_smoothing: float = 0.1
    precision: str = "float32"  # or mixed_bfloat16, mixed_float16
    jit_compile: str = "auto"
    steps_per_execution: int = 1
    local_devices: int = 1  # of each rank
    seed: int = 0
    checkpoint_steps: int = 0  # steps between checkpoints; 0 for one checkpoint an epoch
    checkpoint_minutes: float = 0  # or the time between them
    keep_checkpoints: int = 2  # the newest ones; the best by val_loss is kept in addition
    bleu_sentences: int = 200  # of the dev set, translated after every epoch; 0 for none
    tensorboard: bool = False


@dataclasses.dataclass
class SearchOptions:
    """How translations are searched for."""

    beam_size: int = 4
    length_penalty: float = 0.6
    max_length: int | None = None


@dataclasses.dataclass
class RunConfig:
    """All options of a run, as its folder keeps them in config.yaml."""

    data: DataOptions = dataclasses.field(default_factory=DataOptions)
    tokenizer: TokenizerOptions = dataclasses.field(default_factory=TokenizerOptions)
    model: ModelOptions = dataclasses.field(default_factory=ModelOptions)
    training: TrainingOptions = dataclasses.field(default_factory=TrainingOptions)
    parallel: TransformerOpParallelConfig = dataclasses.field(
        default_factory=TransformerOpParallelConfig
    )
    search: SearchOptions = dataclasses.field(default_factory=SearchOptions)


# Least and greatest values of options; None for no bound.
_BOUNDS = {
    "data.max_length": (1, None),
    "data.max_ratio": (1, None),
    "data.batch_tokens": (1, None),
    "data.batch_size": (1, None),
    "data.num_buckets": (1, None),
    "tokenizer.vocab_size": (16, None),
    "training.epochs": (1, None),
    "training.max_minutes": (0, None),
    "training.learning_rate": (0, None),
    "training.warmup_steps": (0, None),
    "training.weight_decay": (0, None),
    "training.beta_2": (0, 1),
    "training.clip_norm": (0, None),
    "training.label_smoothing": (0, 0.999),
    "training.steps_per_execution": (1, None),
    "training.local_devices": (1, None),
    "training.seed": (0, None),
    "training.checkpoint_steps": (0, None),
    "training.checkpoint_minutes": (0, None),
    "training.keep_checkpoints": (1, None),
    "training.bleu_sentences": (0, None),
    "search.beam_size": (1, None),
    "search.length_penalty": (0, None),
    "search.max_length": (1, None),
}
_CHOICES = {
    "training.schedule": ("inverse_sqrt", "linear", "cosine", "constant"),
    "training.precision": ("float32", "mixed_bfloat16", "mixed_float16"),
    "training.jit_compile": ("auto", "true", "false"),
    "model.positions": ("sinusoidal", "learned"),
}


def load_config(path: str | os.PathLike | None = None, settings: Iterable[str] = ()) -> RunConfig:
    """Read a config file, and replace the values that `--set` gives.

    Args:
        path: a YAML file; None for the defaults.
        settings: texts "section.key=value".

    Raises:
        InputError: the file is missing or not YAML, a key is unknown (says the
            nearest known one), or a value is wrong.
    """
    config = RunConfig()
    for key, value in _flatten(_read_yaml(path), str(path)).items() if path else ():
        _set(config, key, value, str(path))
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise InputError(f"--set {setting}: expected section.key=value")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise InputError(
                f"--set {setting}: the value is not YAML ({_first_line(error)})"
            ) from None
        _set(config, key.strip(), value, "--set")
    return config


def save_config(config: RunConfig, path: str | os.PathLike) -> None:
    """Write the options of a run as YAML."""
    sections = {
        section.name: dataclasses.asdict(getattr(config, section.name))
        for section in dataclasses.fields(config)
    }
    pathlib.Path(path).write_text(yaml.safe_dump(sections, sort_keys=False), encoding="utf-8")


def _read_yaml(path):
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"{path}: there is no such config file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: the config file cannot be read ({error})") from None
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(f"{path}: the config file is not YAML ({_first_line(error)})") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise InputError(f"{path}: expected sections with keys, got {type(content).__name__}")
    return content


def _first_line(error):
    return " ".join(str(error).split())


def _flatten(content, path):
    flat = {}
    for section, values in content.items():
        if section not in RunConfig.__dataclass_fields__:
            _set(RunConfig(), str(section), values, path)  # says what is known
        if values is not None and not isinstance(values, dict):
            raise InputError(
                f"{path}: section {section} holds {values!r}, expected keys and values"
            )
        flat.update({f"{section}.{key}": value for key, value in (values or {}).items()})
    return flat


def _known_keys():
    return [
        f"{section.name}.{field.name}"
        for section in dataclasses.fields(RunConfig)
        for field in dataclasses.fields(section.default_factory)
    ]


def _set(config, key, value, origin):
    """Set "section.key", converted to the field's type and checked."""
    if key not in _known_keys():
        known = _known_keys() if "." in key else list(RunConfig.__dataclass_fields__)
        known += [] if "." in key else _known_keys()
        names = {name.split(".")[-1]: name for name in reversed(_known_keys())}
        close = difflib.get_close_matches(key, known, n=1)
        close = close or difflib.get_close_matches(key.split(".")[-1], names, n=1, cutoff=0.5)
        nearest = names.get(close[0], close[0]) if close else None
        hint = f"did you mean {nearest}?" if nearest else f"sections are {', '.join(known)}"
        raise InputError(f"{origin}: unknown key {key}; {hint}")
    section, name = key.split(".")
    options = getattr(config, section)
    try:
        if key == "parallel.recompute" and isinstance(value, dict):
            value = TransformerRecomputeConfig(**value)
        if section != "parallel":
            value = _convert(key, value, typing.get_type_hints(type(options))[name])
        setattr(options, name, value)
    except (TypeError, ValueError) as error:
        raise InputError(f"{origin}: {error if key in str(error) else f'{key}: {error}'}") from None


def _convert(key, value, kind):
    kinds = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if value is None and type(None) in kinds:
        return None
    kind = kinds[0]
    expected = {int: "an integer", float: "a number", bool: "true or false", str: "a text"}[kind]
    if kind is float and not isinstance(value, bool):
        try:
            value = float(value)  # YAML takes 1e-3, without a dot, for a text
        except (TypeError, ValueError):
            raise TypeError(f"{key} must be {expected}, got {value!r}") from None
    if kind is str and isinstance(value, (bool, int, float)):
        value = str(value).lower()
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise TypeError(f"{key} must be {expected}, got {value!r}")
    low, high = _BOUNDS.get(key, (None, None))
    if low is not None and value < low:
        raise ValueError(f"{key} must be at least {low}, got {value}")
    if high is not None and value > high:
        raise ValueError(f"{key} must be at most {high}, got {value}")
    if key in _CHOICES and value not in _CHOICES[key]:
        raise ValueError(f"{key} must be one of {', '.join(_CHOICES[key])}, got {value!r}")
    return value
