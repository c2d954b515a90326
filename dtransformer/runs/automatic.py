"""`parallel: auto`: the layout of a run is the planner's."""

import importlib
from collections.abc import Mapping

from dtransformer.architectures import Architecture
from dtransformer.planner.automatic import automatic_plan
from dtransformer.planner.clusters import Cluster
from dtransformer.planner.machine import this_cluster
from dtransformer.planner.models import from_architecture
from dtransformer.planner.report import fields_of
from dtransformer.planner.search import Plan
from dtransformer.planner.shape import ModelShape
from dtransformer.runs.config import RunConfig
from dtransformer.runs.options import USUAL_VOCABULARY, TranslationData

_ATTENTION = (
    *("blocks/block_0/attention", "transformer/encoder/block_0/attention"),
    *(f"transformer/decoder/block_0/{kind}_attention" for kind in ("self", "cross")),
)
_DENSE = tuple(
    f"{x}/block_0/feed_forward" for x in ("blocks", "transformer/encoder", "transformer/decoder")
)
# What the planner calls a kernel that may have an adapter -> the layers with such ones.
_ADAPTED = {
    **dict.fromkeys(("query", "key", "value", "output", "latent"), _ATTENTION),
    **dict.fromkeys(("query_down", "query_up", "key_value"), _ATTENTION),
    **dict.fromkeys(("mapping", "gate", "projection"), _DENSE),
}
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
    training = config.training
    cluster = cluster or this_cluster(local_devices=training.local_devices)
    length, rows = batch_of_run(config, cluster.num_devices)
    return automatic_plan(
        shape_of_run(config, length),
        rows,
        cluster=cluster,
        precision=training.precision,
        optimizer=training.optimizer,
        averages=bool(training.ema),
        fixed=fields_of(config.parallel) if fixed is None else fixed,
    )


def batch_of_run(config: RunConfig, devices: int) -> tuple[int, int]:
    """Return the usual length of a run's rows in tokens, and the number of rows of a batch."""
    data = config.data
    if not isinstance(data, TranslationData):
        return data.length, _class_of(config).num_sequences * config.training.batch_size
    length = data.packed_length or max(data.max_length // _USUAL_SHARE, 8)
    rows = data.batch_size or max(data.batch_tokens // length, 1)
    return length, 2 ** (max(rows // devices, 1).bit_length() - 1) * devices  # divisible many times


def shape_of_run(config: RunConfig, length: int) -> ModelShape:
    """Return the shape of a run's model, for rows of some length."""
    vocab_size = config.tokenizer.vocab_size or USUAL_VOCABULARY
    if not isinstance(config.data, TranslationData):
        networks = importlib.import_module("dtransformer.runs.networks")  # imports TensorFlow
        found = networks.architecture(config, _class_of(config).kind.__name__, vocab_size)
        adapters = config.model.adapters
        asked = {}
        if adapters is not None:
            asked = {"adapter_rank": adapters.rank, "adapter_targets": _targets(adapters.targets)}
            asked["adapter_kind"] = adapters.kind
        name = config.model.preset or config.model.from_ or f"{config.task} model"
        return from_architecture(name, found, sequence_length=length, **asked)
    longest = config.data.max_length
    arguments = {
        **vars(config.model),
        "source_vocab_size": vocab_size,
        "target_vocab_size": vocab_size,
    }
    return from_architecture(
        "translation model",
        Architecture("TranslationTransformer", arguments, ""),
        sequence_length=length,
        learned_positions=2 * longest if config.model.positions == "learned" else 0,
    )


def _class_of(config):
    return importlib.import_module("dtransformer.runs.tasks").class_of(config)  # as above


def _targets(patterns):
    """Return what of a block the patterns of adapters match, as the planner names it."""
    weight_paths = importlib.import_module("dtransformer.models.weight_paths")  # imports TensorFlow
    paths = {name: [f"{x}/{name}_kernel" for x in layers] for name, layers in _ADAPTED.items()}
    paths["head"] = ["head/kernel"]
    is_matched = lambda path: weight_paths.is_matched(path, patterns)
    return tuple(name for name, kernels in paths.items() if any(map(is_matched, kernels)))
