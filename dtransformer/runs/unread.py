"""Keys that a run would not read: the tables, and the check that refuses them.

A key that has its default's value is taken anywhere, as saved configs hold all keys.
"""

from dtransformer.errors import InputError, shown
from dtransformer.runs.config import RunConfig, key_of
from dtransformer.runs.options import SECTIONS

_GENERATE = ("causal_lm", "chat")
_TOKENS = ("causal_lm", "masked_lm", "next_sentence", "span_corruption", "chat", "seq2seq")
_CLASSES = ("classification", "token_classification")
_NEW_HEADS = (*_CLASSES, "regression", "reward")
# Keys that not all tasks read whose sections have them -> those that do.
READ = {
    "training.bleu_sentences": ("translation",),
    "training.label_smoothing": ("translation", *_TOKENS, *_CLASSES),
    "training.z_loss": ("translation", *_TOKENS, *_CLASSES),
    "training.neftune_alpha": _GENERATE,
    "evaluation.samples": _GENERATE,
    "evaluation.max_new_tokens": _GENERATE,
    "tokenizer.folder": tuple(task for task in SECTIONS if task != "translation"),
    "data.mask_rate": ("masked_lm", "next_sentence", "span_corruption"),
    "data.mean_span": ("span_corruption",),
    "data.train_on": ("chat",),
    "data.packed": ("chat", "seq2seq"),
    "data.labels": _CLASSES,
    "data.pooling": ("classification", "regression", "embedding"),
    "data.mixture": ("chat", "preference", "reward", *_CLASSES, "regression", "embedding"),
}
_OF_SOURCES = {"weight": READ["data.mixture"], "target": ("seq2seq",)}
LIKE: dict[str, str] = {}  # tasks of programs -> those that read the same
_NOT_GIVEN = (None, "", (), [], False)
_ENDING = ("linear", "cosine", "wsd", "restarts")
# A key, another one that decides whether it is read, and with which of its values. What only says how
# something is done that is switched off, such as export.family, may stay.
_READ_WITH = (
    ("training.decay_steps", "training.schedule", ("wsd",)),
    ("training.restarts", "training.schedule", ("restarts",)),
    ("training.final_learning_rate", "training.schedule", _ENDING),
    *(
        (f"tokenizer.{key}", other, _NOT_GIVEN)
        for key in ("vocab_size", "lower_case", "algorithm")
        for other in ("tokenizer.folder", "model.from")
    ),
    ("data.num_buckets", "data.packed_length", _NOT_GIVEN),
)


def is_read(task: str, key: str) -> bool:
    """Return whether a task reads a key that its sections have."""
    return like(task) in READ.get(key, SECTIONS)


def like(task: str) -> str:
    """Return the library's task whose keys a task reads: itself, but for those of programs."""
    return LIKE.get(task, task)


def check_optimizer(name: str) -> None:
    """Refuse Muon by name, before Keras is asked for its class.

    Raises:
        InputError: If the name is `"muon"`.
    """
    if name.lower() == "muon":
        raise InputError(
            "training.optimizer: muon is not supported yet, because Keras' Muon would update the "
            "kernels of attention and experts (three dimensions) with AdamW, and an untied head "
            "and attention biases (two dimensions) with Muon; use adamw, adafactor, lion or sgd"
        )


def check_read(config: RunConfig) -> None:
    """Refuse Muon, keys that a run would not read, and keys that need another one.

    Raises:
        InputError: If there is such a key. The message names the first one and the fix.
    """
    check_optimizer(config.training.optimizer)
    _check_adapters(config)
    _check_context(config)
    given = {
        f"{name}.{key_of(field)}": value
        for name, section in config.sections().items()
        for field, value in vars(section).items()
        if value != getattr(SECTIONS[config.task][name](), field)
    }
    for key in given:
        if not is_read(config.task, key):
            readers = ", ".join(READ[key])
            raise InputError(f"{key}: task {config.task} does not read it, of tasks {readers}")
    for key, other, values in _READ_WITH:
        if key not in given or other not in config.keys():
            continue
        own = config.option(other)
        if own not in values:
            told = f"{key} is not read where {other} is {shown(own)}"
            raise InputError(f"{told}: leave one of them out")
    has_dev = any(getattr(config.data, key, None) for key in ("dev", "dev_source"))
    for key in ("evaluation.every_steps", "training.early_stopping"):
        if key in given and not has_dev:
            raise InputError(f"{key}: give held-out records, as data.dev, too")
    _check_sources(config)


def _check_adapters(config):
    """Check that adapters have weights to adapt, and that bfloat16 weights are not trained."""
    adapters = getattr(config.model, "adapters", None)
    if adapters is not None and config.model.from_ is None:
        raise InputError(
            f"`model.adapters` (rank {adapters.rank}) requires weights to adapt. Set `model.from` to "
            "the folder of a published model or of a run."
        )
    trains_head = like(config.task) in _NEW_HEADS
    if config.training.precision == "bfloat16" and (adapters is None or trains_head):
        raise InputError(
            "training.precision=bfloat16 stores weights in 16 bits, in which small updates are lost. "
            "Set model.adapters in a task without a new head, or use mixed_bfloat16"
        )


def _check_context(config):
    """Check that context parallelism can divide the rows of sentence pairs."""
    degree, task = config.parallel.context_parallel, like(config.task)
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
            f"parallel.context_parallel={degree} must divide the length of all rows, which varies in "
            f"task {task} unless rows are packed. Set {fix}, or use context_parallel=1"
        )


def _check_sources(config):
    for part in ("train", "dev"):
        for source in getattr(config.data, part, ()):
            for key, readers in _OF_SOURCES.items():
                is_read_here = like(config.task) in readers and (key, part) != ("weight", "dev")
                if getattr(source, key) is not None and not is_read_here:
                    told = "tasks " + ", ".join(readers) + " of data.train" * (key == "weight")
                    raise InputError(
                        f"data.{part}: {key} is not read here, of {told}: leave it out"
                    )
