"""Teacher of a run: the frozen network whose logits the student learns from."""

import contextlib
import dataclasses
import pathlib

from dtransformer.datasets.tokenizer_folder import are_equal, load_tokenizer
from dtransformer.errors import InputError, raise_as_input_error, short_repr
from dtransformer.layers import CrossEntropyLoss, DistillationLoss
from dtransformer.models.base import TokenModel
from dtransformer.runs import networks
from dtransformer.runs.config import RunConfig
from dtransformer.runs.identity import TOKENIZER, is_run
from dtransformer.runs.tasks import load_run
from dtransformer.runs.tasks.base import Task
from dtransformer.trainers.distilled import check_teacher


def load_teacher(task: Task) -> TokenModel | None:
    """Load the network in `distillation.teacher` of a task's config. All ranks call it.

    Args:
        task: Task with a network, after `make_network`.

    Returns:
        The teacher in the precision of the run, or `None` if the config has no teacher.

    Raises:
        InputError: If the folder is missing or unusable, or its network has another class,
            vocabulary or tokenizer, or fewer positions than the rows have tokens.
    """
    options = task.config.sections().get("distillation")
    if options is None or options.teacher is None:
        return None
    folder = pathlib.Path(options.teacher)
    if not folder.is_dir():
        raise InputError(
            f"`distillation.teacher`: the folder {short_repr(str(folder))} does not exist. Set it to a "
            "published folder or a run folder."
        )
    tokenizer = task.tokenizer
    with contextlib.suppress(InputError):  # A folder of weights may have no tokenizer.
        tokenizer = load_tokenizer(folder / TOKENIZER if is_run(folder) else folder)
    if not are_equal(task.tokenizer, tokenizer):
        raise InputError(
            f"`distillation.teacher`: {folder} has another tokenizer than the run. Set "
            "tokenizer.folder to the teacher's tokenizer, or choose another teacher."
        )
    teacher = networks.load(folder, task.config.training.precision, {}, load_run)
    with raise_as_input_error(f"distillation.teacher: {folder}", ValueError):
        check_teacher(task.network, teacher, distillation_loss(task.config, task.loss()))
    networks.check_positions(teacher, task.config.data.length + task.num_added)
    return teacher


def distillation_loss(config: RunConfig, loss: CrossEntropyLoss) -> DistillationLoss:
    """Return a task's loss, mixed with the divergence that `distillation` specifies."""
    options = dataclasses.asdict(config.distillation)
    del options["teacher"]
    return DistillationLoss.from_config({**loss.get_config(), **options})
