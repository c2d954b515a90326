"""`parallel: auto`: the layout of a run is the planner's."""

from collections.abc import Mapping

from dtransformer.architectures import Architecture
from dtransformer.cli.config import RunConfig
from dtransformer.planner.automatic import automatic_plan
from dtransformer.planner.clusters import Cluster
from dtransformer.planner.machine import this_cluster
from dtransformer.planner.models import from_architecture
from dtransformer.planner.report import fields_of
from dtransformer.planner.search import Plan
from dtransformer.planner.shape import ModelShape

# Sentences are of all lengths up to `data.max_length`: batches are planned as if of this share.
_USUAL_SHARE = 4


def plan_of_run(
    config: RunConfig, cluster: Cluster | None = None, fixed: Mapping | None = None
) -> Plan:
    """Return the plan of a run.

    Args:
        config: the run's config.
        cluster: what it runs on; this job's ranks by default.
        fixed: dict of fields of `parallel` that are kept; those that are not the defaults by
            default.

    Raises:
        InputError: nothing fits, or no layout has what is given.
    """
    training, data = config.training, config.data
    cluster = cluster or this_cluster(local_devices=training.local_devices)
    devices = cluster.num_devices
    length = data.packed_length or max(data.max_length // _USUAL_SHARE, 8)
    rows = data.batch_size or max(data.batch_tokens // length, 1)
    rows = 2 ** (max(rows // devices, 1).bit_length() - 1) * devices  # divisible many times
    return automatic_plan(
        shape_of_run(config, length),
        rows,
        cluster=cluster,
        precision=training.precision,
        optimizer=training.optimizer,
        fixed=fields_of(config.parallel) if fixed is None else fixed,
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
