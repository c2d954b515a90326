"""Check that a run reads all keys that its config sets.

Saved configs contain all keys, so a key with its default value is always accepted.
"""

from dtransformer.errors import InputError, short_repr
from dtransformer.preference_losses import REFERENCE_LOSSES
from dtransformer.runs.config import RunConfig, yaml_key
from dtransformer.runs.options import SECTIONS

_GENERATE = ("causal_lm", "chat")
_DOCUMENTS = ("causal_lm", "masked_lm", "next_sentence", "span_corruption")
_TOKENS = (*_DOCUMENTS, "chat", "seq2seq")
_CLASSES = ("classification", "token_classification")
_NEW_HEADS = (*_CLASSES, "regression", "ranking", "reward")
# Keys that only some tasks read, with the names of these tasks.
TASKS_BY_KEY = {
    "training.bleu_sentences": ("translation",),
    "training.label_smoothing": ("translation", *_TOKENS, *_CLASSES),
    "training.z_loss": ("translation", *_TOKENS, *_CLASSES),
    "training.chunk_tokens": ("translation", *_TOKENS),
    "training.neftune_alpha": _GENERATE,
    "evaluation.samples": _GENERATE,
    "evaluation.max_new_tokens": _GENERATE,
    "tokenizer.folder": tuple(task for task in SECTIONS if task != "translation"),
    "data.mask_rate": ("masked_lm", "next_sentence", "span_corruption"),
    "data.all_positions": ("masked_lm", "next_sentence"),
    "data.mean_span": ("span_corruption",),
    "data.train_on": ("chat",),
    "data.packed": ("chat", "seq2seq"),
    "data.labels": _CLASSES,
    "data.pooling": ("classification", "regression", "ranking", "embedding"),
    "data.mixture": ("chat", "preference", "kto", *_NEW_HEADS, "embedding"),
}
_SOURCE_KEYS = {"weight": (*_DOCUMENTS, *TASKS_BY_KEY["data.mixture"]), "target": ("seq2seq",)}
BASE_TASKS: dict[
    str, str
] = {}  # Registered tasks, each with the built-in task that has the same keys.
_UNSET = (None, "", (), [], False)
# Schedules that depend on the number of training steps, and their additional options.
SCHEDULES_WITH_END = {
    "linear": (),
    "cosine": (),
    "wsd": ("decay_steps",),
    "restarts": ("restarts",),
}
# Tuples (key, other key, values): `key` is read only if the other key has one of these values. Keys
# that only refine a disabled feature, such as export.family, are accepted.
_READ_ONLY_WITH = (
    ("training.decay_steps", "training.schedule", ("wsd",)),
    ("training.restarts", "training.schedule", ("restarts",)),
    ("training.muon", "training.optimizer", ("muon", "Muon")),
    ("training.final_learning_rate", "training.schedule", SCHEDULES_WITH_END),
    *(
        (f"tokenizer.{key}", other, _UNSET)
        for key in ("vocab_size", "lower_case", "algorithm")
        for other in ("tokenizer.folder", "model.from")
    ),
    ("data.num_buckets", "data.packed_length", _UNSET),
    ("training.simpo_gamma", "training.loss", ("simpo",)),
    ("training.reference_free", "training.loss", REFERENCE_LOSSES),
)


def is_read(task: str, key: str) -> bool:
    """Return whether a task reads a key of its sections."""
    return get_base_task(task) in TASKS_BY_KEY.get(key, SECTIONS)


def get_base_task(task: str) -> str:
    """Return the built-in task with the same keys: `task` itself, unless it was registered."""
    return BASE_TASKS.get(task, task)


def check_read(config: RunConfig) -> None:
    """Check that a run reads all keys of a config that differ from their defaults.

    Raises:
        InputError: If the task or another option makes a key unused, or a required key is missing.
            The message names the first wrong key and the fix.
    """
    _check_adapters(config)
    _check_context(config)
    changed = {
        f"{name}.{yaml_key(field)}": value
        for name, section in config.sections().items()
        for field, value in vars(section).items()
        if value != getattr(SECTIONS[config.task][name](), field)
    }
    for key in changed:
        if not is_read(config.task, key):
            readers = ", ".join(TASKS_BY_KEY[key])
            raise InputError(
                f"`{key}` has no effect in task {config.task}, only in {readers}. Remove it."
            )
    for key, other, values in _READ_ONLY_WITH:
        if key not in changed or other not in config.keys():
            continue
        other_value = config.option(other)
        if other_value not in values:
            raise InputError(
                f"`{key}` has no effect with {other}={short_repr(other_value)}. Remove one of them."
            )
    _check_teacher(config, changed)
    optimizer = config.training.optimizer
    if any(group.adamw for group in config.training.groups) and optimizer.lower() != "muon":
        raise InputError(
            f"`training.groups`: adamw has no effect with training.optimizer={optimizer}, only with "
            "muon. Remove it."
        )
    has_dev = any(getattr(config.data, key, None) for key in ("dev", "dev_source"))
    for key in ("evaluation.every_steps", "training.early_stopping"):
        if key in changed and not has_dev:
            raise InputError(f"`{key}` needs held-out records. Set data.dev, or data.dev_source.")
    _check_sources(config)


def _check_teacher(config, changed):
    """Check that options of distillation have a teacher."""
    keys = [key for key in changed if key.startswith("distillation.")]
    if keys and "distillation.teacher" not in keys:
        raise InputError(
            f"`{keys[0]}` has no effect without distillation.teacher. Set the teacher, or remove it."
        )


def _check_adapters(config):
    """Check that adapters have weights to adapt, and that bfloat16 weights are not trained."""
    adapters = getattr(config.model, "adapters", None)
    if adapters is not None and config.model.from_ is None:
        raise InputError(
            f"`model.adapters` (rank {adapters.rank}) requires weights to adapt. Set `model.from` to "
            "the folder of a published model or of a run."
        )
    trains_head = get_base_task(config.task) in _NEW_HEADS
    if config.training.precision == "bfloat16" and (adapters is None or trains_head):
        raise InputError(
            "`training.precision=bfloat16` stores weights in 16 bits and would lose small updates. "
            "Set model.adapters in a task without a new head, or use mixed_bfloat16."
        )


def _check_context(config):
    """Check that context parallelism can divide the rows of sentence pairs."""
    degree = config.parallel.context_parallel
    task = get_base_task(config.task)
    if degree == 1 or task not in ("seq2seq", "translation"):
        return
    if task == "seq2seq":
        length = config.data.length + 1 if config.data.packed else None
        fix = f"data.packed=true and a data.length that is a multiple of {degree} minus 1"
    else:
        length = config.data.packed_length
        fix = f"data.packed_length to a multiple of {degree}"
    if length is None or length % degree:
        raise InputError(
            f"`parallel.context_parallel={degree}` must divide the length of all rows, which varies "
            f"in task {task} unless rows are packed. Set {fix}, or use context_parallel=1."
        )


def _check_sources(config):
    for part in ("train", "dev"):
        for source in getattr(config.data, part, ()):
            for key, readers in _SOURCE_KEYS.items():
                is_read_here = get_base_task(config.task) in readers and (key, part) != (
                    "weight",
                    "dev",
                )
                if getattr(source, key) is not None and not is_read_here:
                    place = "data.train of " if key == "weight" else ""
                    raise InputError(
                        f"`data.{part}`: {key} has no effect here, only in {place}tasks "
                        f"{', '.join(readers)}. Remove it."
                    )
