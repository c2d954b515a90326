"""Plans of distilled runs count the frozen teacher."""

import dataclasses

import pytest

from dtransformer.errors import InputError
from dtransformer.parallel.config.config import TransformerOpParallelConfig
from dtransformer.planner import Cluster, Job, cost, get_device, get_model, plan

STUDENT = get_model("llama2_7b", num_layers=8)
TEACHER = get_model("llama2_7b")
CLUSTER = Cluster(get_device("h100"), 8)
JOB = Job(16, "mixed_bfloat16")


def added_cost(config):
    """Return the bytes and the seconds that the teacher adds, by kind."""
    distilled = dataclasses.replace(STUDENT, teacher=TEACHER)
    with_teacher, without = (cost(model, CLUSTER, JOB, config) for model in (distilled, STUDENT))
    return [
        {kind: value - getattr(without, field)[kind] for kind, value in costs.items()}
        for field in ("bytes_by_kind", "seconds_by_kind")
        for costs in (getattr(with_teacher, field),)
    ]


@pytest.mark.parametrize(
    "fields, num_shards",
    [({}, 1), ({"model_parallel": 8, "vocab_emb_dp": False}, 8), ({"optimizer_shard": 3}, 8)],
    ids=["data", "model", "level 3"],
)
def test_teacher_adds_float32_weights_and_a_forward_pass(fields, num_shards):
    num_bytes, seconds = added_cost(TransformerOpParallelConfig(**fields))
    expected = 4 * TEACHER.parameters() / num_shards
    assert num_bytes["weights"] == pytest.approx(expected, rel=0.01)
    assert num_bytes["gradients"] == num_bytes["states"] == num_bytes["activations"] == 0
    assert seconds["update"] == seconds["recompute"] == 0
    full_step = cost(TEACHER, CLUSTER, JOB, TransformerOpParallelConfig(**fields))
    assert seconds["products"] == pytest.approx(full_step.seconds_by_kind["products"] / 3, rel=0.1)


def test_flops_of_a_teacher_are_a_third_of_its_training_step():
    distilled = dataclasses.replace(STUDENT, teacher=TEACHER)
    added = distilled.flops_per_sequence() - STUDENT.flops_per_sequence()
    assert added == pytest.approx(TEACHER.flops_per_sequence() / 3)


def test_layouts_suit_student_and_teacher():
    small = dataclasses.replace(get_model("llama2_7b", num_layers=2), name="small")
    distilled = dataclasses.replace(STUDENT, teacher=small)
    layouts = plan(distilled, CLUSTER, JOB, top=100).costs
    assert {cost.config.pipeline_stage for cost in layouts} <= {1, 2}
    fixed = Job(16, "mixed_bfloat16", fixed={"pipeline_stage": 4})
    with pytest.raises(InputError, match="small: pipeline_stage=4 is more than the 2 blocks"):
        plan(distilled, CLUSTER, fixed)
