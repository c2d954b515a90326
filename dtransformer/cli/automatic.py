"""`parallel: auto`: the layout of a run is the planner's."""

from dtransformer.architectures import Architecture
from dtransformer.cli.config import RunConfig
from dtransformer.planner.automatic import automatic_plan
from dtransformer.planner.machine import num_ranks
from dtransformer.planner.models import from_architecture
from dtransformer.planner.report import fields_of
from dtransformer.planner.search import Plan
from dtransformer.planner.shape import ModelShape

# Sentences are of all lengths up to `data.max_length`: batches are planned as if of this share.
_USUAL_SHARE = 4


def plan_of_run(config: RunConfig) -> Plan:
    """Return the plan of a run; its `parallel` fields that are not the defaults are kept.

    Args:
        config: the run's config.

    Raises:
        InputError: nothing fits, or no layout has what is given.
    """
    training, data = config.training, config.data
    devices = num_ranks() * training.local_devices
    length = data.packed_length or max(data.max_length // _USUAL_SHARE, 8)
    rows = data.batch_size or max(data.batch_tokens // length, 1)
    rows = 2 ** (max(rows // devices, 1).bit_length() - 1) * devices  # divisible many times
    return automatic_plan(
        shape_of_run(config, length),
        rows,
        local_devices=training.local_devices,
        precision=training.precision,
        optimizer=training.optimizer,
        fixed=fields_of(config.parallel),
    )


def shape_of_run(config: RunConfig, length: int) -> ModelShape:
    """Return the shape of a run's model, for sentences of some length."""
    longest = config.data.max_length
    arguments = {
        **vars(config.model),
        "source_vocab_size": config.tokenizer.vocab_size,
        "target_vocab_size": config.tokenizer.vocab_size,
    }
    return from_architecture(
        "translation model",
        Architecture("TranslationTransformer", arguments, ""),
        sequence_length=length,
        learned_positions=2 * longest if config.model.positions == "learned" else 0,
    )
