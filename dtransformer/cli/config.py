"""The config of a run: YAML files, `--set` options, and their checks."""

import dataclasses
import difflib
import os
from collections.abc import Iterable
from typing import Annotated, Literal

import pydantic
import yaml
from pydantic import Field

from dtransformer.errors import InputError, shown
from dtransformer.inputs.checked import STRICT, problem
from dtransformer.inputs.yaml_file import parse_yaml, read_yaml
from dtransformer.parallel.config.config import (
    MoEConfig,
    TransformerOpParallelConfig,
    TransformerRecomputeConfig,
)
from dtransformer.planner.models import checked

# What values may be. The greatest ones are far beyond what is of use, and keep what is computed
# from them finite; whether there is memory for a run, `needs` says.
Count = Annotated[int, Field(ge=1, le=10**9)]
Number = Annotated[int, Field(ge=0, le=10**9)]
Size = Annotated[int, Field(ge=1, le=2**20)]
Layers = Annotated[int, Field(ge=1, le=200)]
Rate = Annotated[float, Field(ge=0, lt=1)]
Ratio = Annotated[float, Field(ge=1, le=1e9)]
NotNegative = Annotated[float, Field(ge=0, le=1e9)]
Path = Annotated[str, Field(min_length=1, max_length=4095)]
Name = Annotated[str, Field(min_length=1, max_length=100)]

_options = pydantic.dataclasses.dataclass(config={**STRICT, "validate_assignment": True})


@_options
class DataOptions:
    """Where sentences come from, and how they are put into batches."""

    source: Path | None = None  # line-aligned: .sgm, plain text, or either as .gz
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
class TokenizerOptions:
    """One subword vocabulary for both languages."""

    vocab_size: Annotated[int, Field(ge=16, le=10**7)] = 8000  # pieces
    lower_case: bool = False  # whether texts are made lower case


@_options
class ModelOptions:
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
    moe_config: pydantic.InstanceOf[MoEConfig] | None = None  # a mapping of its fields
    moe_every: Layers = 1  # which blocks have experts: every so many


@_options
class TrainingOptions:
    """How the model is trained."""

    epochs: Annotated[int, Field(ge=1, le=10**6)] = 10  # from the run's beginning
    max_minutes: NotNegative | None = None  # stop after the step that passes this
    optimizer: Name = "adamw"  # a Keras optimizer's name
    learning_rate: NotNegative = 1e-3  # the greatest, after the warm-up
    schedule: Literal["inverse_sqrt", "linear", "cosine", "constant"] = "inverse_sqrt"
    warmup_steps: Number = 400  # in which the rate rises from 0
    weight_decay: NotNegative = 0.01  # not on norms and biases
    beta_2: Rate = 0.98  # of Adam
    clip_norm: NotNegative | None = 1.0  # the greatest norm of all gradients
    label_smoothing: Rate = 0.1  # the share that other tokens have
    precision: Literal["float32", "mixed_bfloat16", "mixed_float16"] = "float32"
    jit_compile: Literal["auto", "true", "false"] = "auto"
    steps_per_execution: Annotated[int, Field(ge=1, le=10**4)] = 1  # steps of a call
    local_devices: Annotated[int, Field(ge=1, le=128)] = 1  # of each rank
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0  # of weights, dropout and shuffling
    checkpoint_steps: Number = 0  # steps between checkpoints; 0 for one checkpoint an epoch
    checkpoint_minutes: NotNegative = 0  # or the time between them
    keep_checkpoints: Count = 2  # the newest ones; the best by val_loss is kept in addition
    bleu_sentences: Number = 200  # of the dev set, translated after every epoch; 0 for none
    tensorboard: bool = False  # write its logs into the run folder
    layout: Literal["given", "auto"] = "given"  # "auto", or `parallel: auto`: the planner's


@_options
class SearchOptions:
    """How translations are searched for."""

    beam_size: Annotated[int, Field(ge=1, le=1000)] = 4  # hypotheses; 1 is greedy search
    length_penalty: Annotated[float, Field(ge=0, le=100)] = 0.6  # exponent of the length penalty
    max_length: Count | None = None  # tokens; by default by the source


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


# Options that are mappings of fields themselves.
_MAPPINGS = {
    "parallel.recompute": TransformerRecomputeConfig,
    "model.moe_config": MoEConfig,
}
_MAX_DEGREE = 4096  # of what counts ranks, stages and micro-batches
_NO_DEGREE = "parallel.parallel_optimizer_threshold"
_MAX_KEY = 100  # characters that are compared with the names of options


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
    for key, value in _flatten(read_yaml(path), str(path)).items() if path is not None else ():
        set_option(config, key, value, str(path))
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            raise InputError(f"--set {shown(setting)}: expected section.key=value")
        key, value = key.strip(), parse_yaml(text, f"--set {shown(key)}")
        if (key, value) == ("parallel", "auto"):
            key = "training.layout"
        set_option(config, key, value, "--set")
    return config


def save_config(config: RunConfig, path: str | os.PathLike) -> None:
    """Write the options of a run as YAML."""
    from dtransformer.datasets.text_files import write_text_atomically

    sections = {
        section.name: dataclasses.asdict(getattr(config, section.name))
        for section in dataclasses.fields(config)
    }
    text = yaml.safe_dump(sections, sort_keys=False, allow_unicode=True)
    write_text_atomically(path, text)


def _flatten(content, path):
    """Return {"section.key": value} of a config file's content."""
    if not isinstance(content, dict | None):
        raise InputError(f"{path}: expected sections with keys, got {type(content).__name__}")
    flat = {}
    for section, values in (content or {}).items():
        if section == "parallel" and values == "auto":
            values, section = {"layout": "auto"}, "training"
        if section not in RunConfig.__dataclass_fields__ and not isinstance(values, dict):
            flat[section] = values
            continue
        if not isinstance(values, dict | None):
            raise InputError(
                f"{path}: section {section} holds {shown(values)}, expected keys and values"
            )
        flat.update({f"{section}.{key}": value for key, value in (values or {}).items()})
    unknown = [key for key in flat if key not in _known_keys()]
    near = lambda key: difflib.get_close_matches(key[:_MAX_KEY], _known_keys(), cutoff=0.8)
    foreign = [key for key in unknown if not near(key)]
    if len(foreign) > 1:
        raise InputError(
            f"{path}: {' and '.join(map(shown, foreign[:2]))} are no keys of dtransformer train, which "
            "trains translation models: is it the config of a script, which takes it by its --config?"
        )
    for key in unknown[:1]:
        set_option(RunConfig(), key, flat[key], path)  # says what is near
    return flat


def _known_keys():
    return [
        f"{section.name}.{field.name}"
        for section in dataclasses.fields(RunConfig)
        for field in dataclasses.fields(section.default_factory)
    ]


def set_option(config: RunConfig, key: str, value: object, origin: str) -> None:
    """Set an option of a run, checked.

    Args:
        config: the config.
        key: "section.key".
        value: as YAML has it.
        origin: where it comes from, for messages.

    Raises:
        InputError: there is no such option, or it may not have this value.
    """
    if key not in _known_keys():
        known = _known_keys() if "." in key else list(RunConfig.__dataclass_fields__)
        known += [] if "." in key else _known_keys()
        names = {name.split(".")[-1]: name for name in reversed(_known_keys())}
        key = key[:_MAX_KEY]
        close = difflib.get_close_matches(key, known, n=1)
        close = close or difflib.get_close_matches(key.split(".")[-1], names, n=1, cutoff=0.5)
        nearest = names.get(close[0], close[0]) if close else None
        sections = ", ".join(RunConfig.__dataclass_fields__)
        hint = f"did you mean {nearest}?" if nearest else f"sections are {sections}"
        raise InputError(f"{origin}: unknown key {key}; {hint}")
    section, name = key.split(".")
    if key == "training.jit_compile" and isinstance(value, bool):
        value = str(value).lower()  # YAML has the words for its own
    try:
        if key in _MAPPINGS and isinstance(value, dict):
            value = checked(_MAPPINGS[key], value)
        is_degree = section == "parallel" and key != _NO_DEGREE
        if is_degree and type(value) is int and value > _MAX_DEGREE:
            raise ValueError(f"{key} must be at most {_MAX_DEGREE}, got {value}")
        setattr(getattr(config, section), name, value)
    except pydantic.ValidationError as error:
        raise InputError(f"{origin}: {key} {problem(error)[1]}") from None
    except (TypeError, ValueError, ArithmeticError, RecursionError) as error:
        raise InputError(f"{origin}: {error if key in str(error) else f'{key}: {error}'}") from None
