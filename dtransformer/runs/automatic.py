"""`parallel: auto`: let the planner choose the layout of a run."""

import importlib
import pathlib
from collections.abc import Mapping

from dtransformer.architectures import Architecture
from dtransformer.planner.automatic import automatic_plan
from dtransformer.planner.clusters import Cluster
from dtransformer.planner.machine import this_cluster
from dtransformer.planner.models import from_architecture
from dtransformer.planner.report import get_changed_fields
from dtransformer.planner.search import Plan
from dtransformer.planner.shape import ModelShape
from dtransformer.runs.config import RunConfig
from dtransformer.runs.options import DEFAULT_VOCAB_SIZE, TranslationData
from dtransformer.transformer_config import TRANSLATION

_ATTENTION = (
    *("blocks/block_0/attention", "transformer/encoder/block_0/attention"),
    *(f"transformer/decoder/block_0/{kind}_attention" for kind in ("self", "cross")),
)
_DENSE = tuple(
    f"{x}/block_0/feed_forward" for x in ("blocks", "transformer/encoder", "transformer/decoder")
)
# The planner's name of each kernel that can have an adapter, and the layers that contain it.
_ADAPTABLE_KERNELS = {
    **dict.fromkeys(("query", "key", "value", "output", "latent"), _ATTENTION),
    **dict.fromkeys(("query_down", "query_up", "key_value"), _ATTENTION),
    **dict.fromkeys(("mapping", "gate", "projection"), _DENSE),
}
# The planner assumes that a mean sentence has a quarter of `data.max_length` tokens.
_LENGTH_DIVISOR = 4


def plan_run(
    config: RunConfig, cluster: Cluster | None = None, fixed: Mapping | None = None
) -> Plan:
    """Plan the layout of a run.

    Args:
        config: Config of the run.
        cluster: Devices to plan for. Defaults to the devices of this job's ranks.
        fixed: Mapping from field names of `parallel` to values that the plan must keep. Defaults to
            all fields of `config.parallel` that differ from their defaults.

    Returns:
        A `Plan`. Its layout `best` fits in the memory of the devices.

    Raises:
        InputError: If no layout with the fixed fields fits in memory.
    """
    training = config.training
    cluster = cluster or this_cluster(local_devices=training.local_devices)
    length, rows = typical_batch(config, cluster.num_devices)
    return automatic_plan(
        get_run_shape(config, length),
        rows,
        cluster=cluster,
        precision=training.precision,
        optimizer=training.optimizer,
        averages=bool(training.ema),
        fixed=get_changed_fields(config.parallel) if fixed is None else fixed,
    )


def typical_batch(config: RunConfig, devices: int) -> tuple[int, int]:
    """Return the typical row length in tokens and the number of rows of a global batch.

    Sentences of the translation task vary in length. Their typical length is `data.packed_length`,
    or else a quarter of `data.max_length`, at least 8. The number of their rows is rounded down to a
    power of two per device, so that many layouts divide the batch.

    Args:
        config: Config of the run.
        devices: Integer. Number of devices of the job.
    """
    data = config.data
    if not isinstance(data, TranslationData):
        return data.length, _task_class(config).num_sequences * config.training.batch_size
    length = data.packed_length or max(data.max_length // _LENGTH_DIVISOR, 8)
    rows = data.batch_size or max(data.batch_tokens // length, 1)
    return length, 2 ** (max(rows // devices, 1).bit_length() - 1) * devices


def get_run_shape(config: RunConfig, length: int) -> ModelShape:
    """Return the shape of a run's model for the planner, without building the model.

    Args:
        config: Config of the run.
        length: Integer. Tokens per row.

    Raises:
        InputError: If the preset or the folder of the model does not exist.
    """
    vocab_size = config.tokenizer.vocab_size or DEFAULT_VOCAB_SIZE
    if not isinstance(config.data, TranslationData):
        networks = importlib.import_module("dtransformer.runs.networks")  # imports TensorFlow
        kind = _task_class(config).kind.__name__
        base = networks.architecture(config, kind, vocab_size)
        adapters = config.model.adapters
        adapter_options = {}
        if adapters is not None:
            adapter_options = {
                "adapter_rank": adapters.rank,
                "adapter_targets": _adapter_targets(adapters.targets),
            }
            adapter_options["adapter_kind"] = adapters.kind
            # A choice of `base_targets` is planned like all kernels of the blocks.
            adapter_options["base_dtype"] = adapters.base_dtype
        positions = _task_class(config).predicted_positions(config)
        name = config.model.preset or config.model.from_ or f"{config.task} model"
        lengths = {"sequence_length": length, "predicted_positions": positions}
        distillation = config.sections().get("distillation")
        teacher = None
        if distillation is not None and distillation.teacher is not None:
            teacher_base = networks.folder_architecture(pathlib.Path(distillation.teacher), kind)
            teacher = from_architecture(f"teacher {distillation.teacher}", teacher_base, **lengths)
        return from_architecture(name, base, teacher=teacher, **lengths, **adapter_options)
    arguments = {
        **vars(config.model),
        "source_vocab_size": vocab_size,
        "target_vocab_size": vocab_size,
        "max_source_length": config.data.max_length,
        "max_target_length": config.data.max_length + 1,
    }
    base = Architecture(TRANSLATION, arguments, "")
    return from_architecture("translation model", base, sequence_length=length)


def _task_class(config):
    return importlib.import_module("dtransformer.runs.tasks").get_task_class(
        config
    )  # imports TensorFlow


def _adapter_targets(patterns):
    """Return the planner's names of all kernels that the adapters' patterns match."""
    weight_paths = importlib.import_module("dtransformer.models.weight_paths")  # imports TensorFlow
    paths = []
    for name, layers in _ADAPTABLE_KERNELS.items():
        paths += [(name, f"{layer}/{name}_kernel") for layer in layers]
    paths.append(("head", "head/kernel"))
    names = [name for name, path in paths if weight_paths.is_matched(path, patterns)]
    return tuple(dict.fromkeys(names))
