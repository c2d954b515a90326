"""Keys that a run would not read: the tables, and the check that refuses them.

A key that has its default's value is taken anywhere, as saved configs hold all keys.
"""

import dataclasses

from dtransformer.errors import InputError, shown
from dtransformer.runs.config import RunConfig, key_of
from dtransformer.runs.options import SECTIONS

_BLEU = {"training.bleu_sentences"}
_SAMPLES = {"evaluation.samples", "evaluation.max_new_tokens"}
_MASKS = {"data.mask_rate", "data.mean_span"}
_NO_TOKENS = {*_BLEU, *_SAMPLES, "training.label_smoothing"}  # nothing of a vocabulary is learnt
_PAIRS = {*_NO_TOKENS, "data.train_on", "data.packed"}
_ONE_A_ROW = {"data.packed"}
# Task -> the keys of its sections that it does not read.
UNREAD = {
    "translation": {"tokenizer.folder"},
    "causal_lm": {*_BLEU, *_MASKS},
    "masked_lm": {*_BLEU, *_SAMPLES, "data.mean_span"},
    "next_sentence": {*_BLEU, *_SAMPLES, "data.mean_span"},
    "span_corruption": {*_BLEU, *_SAMPLES},
    "chat": _BLEU,
    "preference": _PAIRS,
    "reward": _PAIRS,
    "classification": {*_BLEU, *_SAMPLES, *_ONE_A_ROW},
    "token_classification": {*_BLEU, *_SAMPLES, *_ONE_A_ROW, "data.pooling"},
    "regression": {*_NO_TOKENS, *_ONE_A_ROW, "data.labels"},
    "embedding": {*_NO_TOKENS, *_ONE_A_ROW, "data.labels"},
    "seq2seq": {*_BLEU, *_SAMPLES, "data.mixture"},
}
_NOT_GIVEN = (None, "", (), [], False)
_ENDING = ("linear", "cosine", "wsd", "restarts")
# A key, another one that decides whether it is read, and with which of its values; None: if given.
_READ_WITH = (
    ("training.decay_steps", "training.schedule", ("wsd",)),
    ("training.restarts", "training.schedule", ("restarts",)),
    ("training.final_learning_rate", "training.schedule", _ENDING),
    ("evaluation.max_new_tokens", "evaluation.samples", None),
    ("export.family", "export.folder", None),
    ("export.merge_adapters", "export.folder", None),
    ("tokenizer.vocab_size", "tokenizer.folder", _NOT_GIVEN),
    ("tokenizer.lower_case", "tokenizer.folder", _NOT_GIVEN),
    ("tokenizer.vocab_size", "model.from", _NOT_GIVEN),
    ("tokenizer.lower_case", "model.from", _NOT_GIVEN),
    ("data.num_buckets", "data.packed_length", _NOT_GIVEN),
)


def check_read(config: RunConfig) -> None:
    """Refuse keys that the run of a config would not read, and weights of sources.

    Raises:
        InputError: names the first, and what would read it.
    """
    given = {
        f"{name}.{key_of(field.name)}": getattr(section, field.name)
        for name, section in config.sections().items()
        for field in dataclasses.fields(section)
        if getattr(section, field.name) != _default(field)
    }
    for key in given:
        if key in UNREAD[config.task]:
            raise InputError(f"{key}: task {config.task} does not read it{_reader(key)}")
    for key, other, values in _READ_WITH:
        if key not in given or other not in config.keys():
            continue
        own = config.option(other)
        if (own in _NOT_GIVEN) if values is None else (own not in values):
            there = "is not given" if own in _NOT_GIVEN else f"is {shown(own)}"
            raise InputError(f"{key} is not read where {other} {there}: leave one of them out")
    for part in ("train", "dev"):
        _check_sources(config.task, part, getattr(config.data, part, ()))


def _check_sources(task, part, sources):
    of_documents = "documents" in {field.name for field in _fields_of_data(task)}
    for source in sources:
        if source.weight is not None and (of_documents or part == "dev" or task == "seq2seq"):
            why = "task chat mixes records, which may be texts" if of_documents else "of data.train"
            raise InputError(f"data.{part}: a weight is not read here: leave it out ({why})")
        if source.target is not None and task != "seq2seq":
            raise InputError(f"data.{part}: target is of task seq2seq: leave it out")


def _fields_of_data(task):
    return dataclasses.fields(SECTIONS[task]["data"])


def _default(field):
    made = field.default_factory
    return field.default if made is dataclasses.MISSING else made()


def _reader(key):
    """Return a hint at tasks that read a key."""
    readers = [x for x in SECTIONS if key in RunConfig(x).keys() and key not in UNREAD[x]]
    return f", of tasks {', '.join(readers)}" if readers else ""
