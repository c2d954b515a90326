"""The quick suite trains every pair of techniques that interact in some layout."""

import itertools

import pytest

from dtransformer import TransformerOpParallelConfig
from dtransformer.parallel.config.validators import check_supported
from harness.runs import Run
from tests.distributed.parity_runs import QUICK

# Technique -> (fields of a config that uses it, condition for layouts that use it).
TECHNIQUES = {
    "data": ({"data_parallel": 2}, lambda x: x.data > 1),
    "zero": ({"data_parallel": 2, "optimizer_shard": 2}, lambda x: _flat(x) and x.level < 3),
    "gathered weights": ({"data_parallel": 2, "optimizer_shard": 3}, lambda x: x.level == 3),
    "unsharded states": (
        {"data_parallel": 2, "optimizer_shard": 1, "optimizer_shard_partition": "whole"},
        lambda x: x.partition == "whole" and x.data > x.experts,
    ),
    "model": ({"model_parallel": 2}, lambda x: x.model > 1),
    "rows": ({"model_parallel": 2, "vocab_emb_dp": False}, lambda x: x.rows),
    "sequence": ({"model_parallel": 2, "sequence_parallel": True}, lambda x: x.sequence),
    "context": ({"context_parallel": 2}, lambda x: x.context > 1),
    "experts": ({"data_parallel": 2, "expert_parallel": 2}, lambda x: x.experts > 1),
    # Any schedule counts, because weight updates and sharding do not depend on the schedule.
    "pipeline": (
        {"pipeline_stage": 2, "micro_batch_num": 2, "pipeline_schedule": "1f1b"},
        lambda x: x.stages > 1,
    ),
    "chunks": (
        {"pipeline_chunks": 2, "pipeline_schedule": "interleaved"},
        lambda x: x.stages == 1 and x.chunks > 1,
    ),
    "micro-batches": ({"micro_batch_num": 2}, lambda x: x.micro_batches > 1),
    "recompute": ({"recompute": True}, lambda x: x.recompute),
}
# Techniques that work on a mesh of several ranks.
JOINS_RANKS = {"rows", "sequence", "context", "experts", "gathered weights", "unsharded states"}
JOINS_RANKS |= {"data", "model", "chunks", "micro-batches", "recompute", "pipeline"}
# Ranks share unsharded states after the mesh and the model chunks have added up the gradients.
# The update does not depend on the axis of the sums: `model` stands for them.
INDEPENDENT = {("unsharded states", axis) for axis in ("context", "experts", "chunks")}
LAYOUTS = [Run.from_name(name).layout for name in QUICK]


def _flat(layout):
    return layout.level and layout.partition == "flat" and layout.data > layout.experts


def can_combine(technique, other_technique):
    """Return whether a config can combine two techniques, which may need two values of one field."""
    (config, _), (other_config, _) = TECHNIQUES[technique], TECHNIQUES[other_technique]
    if any(config[field] != other_config[field] for field in config.keys() & other_config.keys()):
        return False
    try:
        check_supported(TransformerOpParallelConfig(**{**config, **other_config}))
    except ValueError:
        return False
    return True


PAIRS = [
    pair
    for pair in itertools.combinations(TECHNIQUES, 2)
    if pair not in INDEPENDENT and can_combine(*pair)
]


@pytest.mark.parametrize("item, other", PAIRS)
def test_quick_suite_trains_every_pair_of_techniques(item, other):
    uses = [layout for layout in LAYOUTS if TECHNIQUES[item][1](layout)]
    assert any(TECHNIQUES[other][1](layout) for layout in uses), f"no layout has {item} and {other}"


@pytest.mark.parametrize("technique", sorted(JOINS_RANKS))
def test_quick_suite_joins_ranks_into_a_mesh_with_every_technique(technique):
    joined = [layout for layout in LAYOUTS if layout.joins_ranks]
    assert any(TECHNIQUES[technique][1](layout) for layout in joined)


@pytest.mark.parametrize(
    "field, values",
    [
        ("level", {0, 1, 2, 3}),
        ("partition", {"flat", "whole"}),
        ("mode", {"ulysses", "all_gather", "ring"}),
        ("schedule", {"1f1b", "gpipe", "interleaved", "zb_h1", "zb_v"}),
        ("devices", {1, 2, 4}),
        ("ranks", {1, 2, 4}),
    ],
)
def test_quick_suite_trains_every_value_of_a_layout_field(field, values):
    assert values <= {getattr(layout, field) for layout in LAYOUTS}
