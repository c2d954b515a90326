"""Plans report memory, step time and the best layout, and reject invalid input."""

import dataclasses
import json
import math
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest
import yaml

from dtransformer.architectures import ARCHITECTURES
from dtransformer.cli import main
from dtransformer.errors import InputError
from dtransformer.limits import MIN_CHUNK_TOKENS
from dtransformer.parallel.config.config import MoEConfig, TransformerOpParallelConfig
from dtransformer.parallel.config.topology import Topology
from dtransformer.parallel.config.validators import check_supported
from dtransformer.parallel.schedules.placement import Placement
from dtransformer.planner import (
    Cluster,
    Job,
    ModelShape,
    cost,
    from_network,
    get_device,
    get_model,
    plan,
    report,
)
from dtransformer.planner.clusters import Link
from dtransformer.planner.cost import evaluate
from dtransformer.planner.grid import enumerate_layouts
from dtransformer.planner.layouts import SCHEDULE_NAMES, Layouts
from dtransformer.planner.machine import cpu_device
from dtransformer.planner.memory import block_activation_bytes
from dtransformer.planner.plan_file import plan_to_yaml
from dtransformer.planner.search import ROOM_SHARE, TIE_SHARE
from dtransformer.planner.stages import stage_kinds
from dtransformer.planner.time import collective_seconds, device_groups
from dtransformer.planner.work import block_passes
from dtransformer.runs.config import load_config
from dtransformer.transformer_config import BlockConfig, TransformerConfig
from tests.models.pretrained.family_rows import PRESET_PATTERNS

SMALL = "gpt2_small"
EXAMPLE = re.compile(r"```\n\$ dtransformer (plan .*)\n(?!```)((?s:.+?))\n```")
PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "planner.md").read_text()


def cluster(devices, device="a100"):
    return Cluster(get_device(device), devices)


@pytest.fixture(scope="module")
def gpt3_plan():
    return plan(get_model("gpt_175b"), cluster(1024), Job(1536))


def test_does_not_import_tensorflow():
    code = (
        "import sys, dtransformer.planner as p;"
        "p.plan(p.get_model('llama2_7b'), p.Cluster(p.get_device('a100'), 8), p.Job(64));"
        "sys.exit(any(name in sys.modules for name in ('tensorflow', 'keras', 'horovod')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_4096_devices_and_a_trillion_parameters():
    """All layouts are evaluated in arrays. docs/planner.md states the duration."""
    model, many, job = get_model("gpt_1t"), cluster(4096), Job(4096)
    assert 1000 < len(enumerate_layouts(model, many, job)) < 200_000
    assert plan(model, many, job).fits


ASKED = [("gpt_175b", 1024, "a100", 1536), ("llama3_8b", 8, "h100", 64)]


@pytest.mark.parametrize("name, devices, device, batch", ASKED)
def test_no_fitting_layout_is_faster(name, devices, device, batch):
    """Only a layout with much more free memory or fewer techniques may be 2% slower."""
    result = plan(get_model(name), cluster(devices, device), Job(batch))
    layouts = enumerate_layouts(result.model, result.cluster, result.job)
    memory, seconds = evaluate(result.model, result.cluster, result.job, layouts)
    fits = memory.total <= result.cluster.memory_bytes
    assert result.num_fitting == fits.sum()
    fastest = seconds.total[fits].min()
    assert fastest <= result.best.step_seconds <= fastest * (1 + TIE_SHARE)
    near = fits & (seconds.total <= fastest * (1 + TIE_SHARE))
    near &= memory.total <= memory.total[near].min() + ROOM_SHARE * result.cluster.memory_bytes
    simplest = layouts.techniques[near].min()
    assert simplest == min(
        layouts.techniques[near & np.isclose(seconds.total, result.best.step_seconds)]
    )
    fullest = result.best.memory_bytes
    assert fullest <= memory.total[near].min() + ROOM_SHARE * result.cluster.memory_bytes


def test_parts_add_up(gpt3_plan):
    for planned in gpt3_plan.costs:
        assert sum(planned.seconds_by_kind.values()) == pytest.approx(planned.step_seconds)
        assert (
            sum(planned.bytes_by_kind.values()) == planned.memory_bytes <= planned.available_bytes
        )
        assert planned.tokens_per_second == pytest.approx(1536 * 2048 / planned.step_seconds)


def test_trainer_supports_proposed_layouts(gpt3_plan):
    for planned in gpt3_plan.costs:
        check_supported(planned.config)
        degrees = (
            planned.config.data_parallel
            * planned.config.model_parallel
            * planned.config.pipeline_stage
        )
        assert degrees == 1024


def test_trainer_supports_every_layout_of_the_grid():
    """The grid checks one layout per combination of techniques, this test every seventh."""
    layouts = enumerate_layouts(get_model(SMALL), cluster(8), Job(16))
    for index in range(0, len(layouts), 7):
        check_supported(layouts.config(index))


def test_layouts_divide_heads_and_sequences_over_ulysses_shards():
    model = get_model(SMALL)
    fixed = {"context_parallel_mode": "ulysses_ring", "ulysses_shards": 4}
    layouts = enumerate_layouts(model, cluster(8), Job(16, fixed=fixed))
    assert set(layouts.context) == {4, 8}
    assert all(model.config.num_heads // layouts.model % 4 == 0)
    with pytest.raises(InputError, match="`ulysses_shards=4` does not divide `context_parallel=2`"):
        enumerate_layouts(model, cluster(8), Job(16, fixed={**fixed, "context_parallel": 2}))
    fixed |= {"context_parallel": 4, "model_parallel": 2}
    with pytest.raises(InputError, match="divides heads over `ulysses_shards=4`.* 6 heads"):
        enumerate_layouts(model, cluster(8), Job(16, fixed=fixed))


def test_cost_of_a_config_equals_the_plan(gpt3_plan):
    expected = cost(gpt3_plan.model, gpt3_plan.cluster, gpt3_plan.job, gpt3_plan.best.config)
    assert expected == gpt3_plan.best


def test_reports_missing_bytes_and_a_change_that_fits():
    model, devices, job = get_model("llama2_7b"), cluster(8), Job(64)
    unsharded = cost(model, devices, job, TransformerOpParallelConfig(micro_batch_num=8))
    assert not unsharded.fits
    assert unsharded.missing_bytes == unsharded.memory_bytes - int(devices.memory_bytes) > 0
    assert f"{unsharded.missing_bytes:,} bytes more" in report.fit_line(unsharded)
    assert unsharded.change.startswith("The cheapest change: data 8 · 8 micro-batches of 1 · ")
    changed = TransformerOpParallelConfig(micro_batch_num=8, optimizer_shard=2)
    assert cost(model, devices, job, changed).fits


def test_reports_the_number_of_devices_that_would_fit():
    result = plan(get_model("gpt_175b"), cluster(8), Job(64))
    assert not result.fits and result.best.missing_bytes > 0
    assert "64 devices are enough" in result.why
    assert plan(get_model("gpt_175b"), cluster(64), Job(64)).fits


def test_more_memory_or_faster_links_are_never_worse():
    model, job = get_model("gpt_18b"), Job(256)
    base = get_device("a100")
    times = []
    for change in ({}, {"memory_gb": 160}, {"between_gb_per_second": 50}):
        device = dataclasses.replace(base, **change)
        times.append(plan(model, Cluster(device, 64), job, top=1).best.step_seconds)
    assert times[1] <= times[0] * (1 + TIE_SHARE)
    assert times[2] < times[0]


def test_keeps_fixed_fields():
    job = Job(
        512, fixed={"model_parallel": 4, "optimizer_shard": 1, "gradient_aggregation_group": 2}
    )
    for planned in plan(get_model("gpt_7.5b"), cluster(32), job).costs:
        assert planned.config.model_parallel == 4 and planned.config.optimizer_shard == 1
        assert planned.config.gradient_aggregation_group == 2


def test_config_contains_fixed_fields_unchanged():
    fixed = {"recompute": {"select": ["attention", "norm"]}, "vocab_emb_dp": True}
    job = Job(64, fixed={**fixed, "gradient_dtype": "float16", "model_parallel": 2})
    best = plan(get_model(SMALL), cluster(8), job).best
    assert best.config.recompute.select == ("attention", "norm")
    assert best.config.vocab_emb_dp and best.config.gradient_dtype == "float16"
    wide = plan(get_model(SMALL), cluster(8), Job(64, fixed={**fixed, "model_parallel": 2})).best
    assert best.seconds_by_kind["reduction"] < wide.seconds_by_kind["reduction"]


def test_model_axis_is_slower_across_nodes():
    """Sums over the model axis are several times slower if it spans nodes."""
    model = get_model("gpt_18b")
    configs = [TransformerOpParallelConfig(model_parallel=t, micro_batch_num=8) for t in (8, 16)]
    inside, across = (cost(model, cluster(16), Job(16), config) for config in configs)
    times = [config.seconds_by_kind["model_parallel"] for config in (inside, across)]
    assert times[1] > 2 * times[0]


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.tensorflow
def test_published_models_have_the_parameters_of_their_networks(name):
    """Networks count their weights by shapes. test_published.py checks the papers' numbers."""
    from dtransformer import models

    architecture = ARCHITECTURES[name]
    network = getattr(models, architecture.network)(**architecture.arguments)
    assert get_model(name).parameters() == network.num_parameters()


# Arguments of networks with experts, and the kind of each block.
EXPERTS = {"expert_num": 4, "num_experts_chosen": 2}
WITH_EXPERTS = [
    ({"moe_config": EXPERTS}, (0, 0, 0, 0, 0)),
    ({"moe_config": EXPERTS, "moe_every": 2}, (0, 1, 0, 1, 0)),
    ({"moe_config": EXPERTS, "moe_every": 5, "gated": True, "use_bias": False}, (0, 0, 0, 0, 1)),
    ({"moe_config": EXPERTS | {"shared_experts": 2}, "moe_every": 3}, (0, 0, 1, 0, 0)),
    ({"moe_config": EXPERTS | {"router_type": "sigmoid"}, "moe_every": 2}, (0, 1, 0, 1, 0)),
    ({"moe_config": EXPERTS | {"dropless": True}}, (0, 0, 0, 0, 0)),
    ({"moe_config": {"expert_num": 1}}, (0, 0, 0, 0, 0)),
]


def _products(network):
    """Return the multiplications per position of a 16-token sequence: kernels, scores and the head."""
    from dtransformer.models.base import active_share

    arguments = network.arguments
    width = arguments.get("head_dim") or arguments["hidden_size"] // arguments["num_heads"]
    scores = arguments["num_layers"] * 2 * 16 * arguments["num_heads"] * width
    table = arguments.get("tied_head", True) * arguments["hidden_size"] * network.vocab_size
    kernels = (
        math.prod(shape) * active_share(path, shape, arguments)
        for path, shape in network.weight_shapes().items()
        if path.endswith("kernel")
    )
    return scores + table + sum(kernels)


@pytest.mark.tensorflow
def test_latent_attention_matches_network_counts():
    from harness.block_networks import deepseek, gpt_oss

    for make in (deepseek, gpt_oss):
        network = make(100, 3)
        model = from_network(network, sequence_length=16)
        assert model.parameters() == network.num_parameters()
        assert model.flops_per_sequence() == pytest.approx(6 * 16 * _products(network), rel=1e-6)


@pytest.mark.tensorflow
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_latent_adapters_match_network_counts(kind):
    from dtransformer.models import add_lora
    from harness.block_networks import deepseek

    network, targets = deepseek(100, 2), ("latent", "query_up", "key_value", "output")
    network.build()
    add_lora(network, 4, targets=[f"*attention/{x}_kernel" for x in targets], kind=kind)
    fields = {"adapter_rank": 4, "adapter_targets": (*targets, "query"), "adapter_kind": kind}
    count = sum(weight.shape.num_elements() for weight in network.trainable_variables)
    assert from_network(network, **fields).trained_parameters() == count


def test_latent_attention_takes_less_time_and_more_memory():
    latents, many = get_model("deepseek_v3", sequence_length=4096), cluster(8)
    attention = dataclasses.replace(latents.config.attention, latent=None)
    config = dataclasses.replace(latents.config, attention=attention)
    plain = dataclasses.replace(latents, config=config)
    layouts = enumerate_layouts(latents, many, Job(8))
    seconds = [block_passes(many.device, x, x.kinds[0], layouts).forward for x in (latents, plain)]
    assert (seconds[0] < seconds[1]).all()
    saved_bytes = [block_activation_bytes(x, x.kinds[0], layouts) for x in (latents, plain)]
    length = layouts.micro_batch * 4096 / layouts.context
    expected = np.where(layouts.recompute < 2, 2 * 2 * length * (512 + 64 + 1536), 0)
    np.testing.assert_allclose(saved_bytes[0] - saved_bytes[1], expected)


@pytest.mark.parametrize("arguments, order", WITH_EXPERTS)
@pytest.mark.tensorflow
def test_experts_match_network_counts(arguments, order):
    from dtransformer.models import CausalLM

    network = CausalLM(100, hidden_size=32, num_heads=4, num_layers=5, max_length=16, **arguments)
    model = from_network(network)
    assert model.order == order
    assert model.parameters() == network.num_parameters()
    assert model.flops_per_sequence() == pytest.approx(6 * 16 * _products(network), rel=1e-6)


@pytest.mark.tensorflow
def test_experts_in_encoder_and_decoder():
    """Every second block of each stack has experts, counted from its first block."""
    from dtransformer.models import TranslationTransformer

    sizes = dict(hidden_size=32, num_heads=4, encoder_layers=3, decoder_layers=4)
    network = TranslationTransformer(100, **sizes, moe_config=EXPERTS, moe_every=2)
    model = from_network(network)
    assert model.order == (0, 1, 0, 2, 3, 2, 3)
    assert [kind.has_experts for kind in model.kinds] == [False, True, False, True]
    assert model.parameters() == network.num_parameters()


def test_stages_with_experts_need_the_most_memory():
    """Of four blocks on four stages, the second and the fourth have experts."""
    sizes = dict(hidden_size=64, num_heads=4, num_layers=4, vocab_size=100)
    experts = {"moe_config": {"expert_num": 8}, "moe_every": 2}
    config = TransformerConfig.from_arguments("CausalLM", **sizes, **experts)
    model = ModelShape("sparse", config, sequence_length=64)
    assert [stage.blocks for stage in stage_kinds(model, Placement.looped(4))] == [
        (1, 0),
        (0, 1),
        (1, 0),
        (0, 1),
    ]
    layouts = Layouts.from_columns(stage=4, micro_batches=8)
    memory, _ = evaluate(model, cluster(4), Job(8, "float32"), layouts)
    assert memory.weights[0] == 4 * model.block_parameters(model.kinds[1])


def test_plan_with_experts_in_some_blocks(capsys, tmp_path):
    path = tmp_path / "model.yaml"
    path.write_text(
        "base: gpt-7.5b\nmoe_config: {expert_num: 8, num_experts_chosen: 2}\nmoe_every: 4\n"
    )
    ask = ["plan", "--model", str(path), "--devices", "64", "--global-batch", "512", "--json"]
    assert main([*ask, "--fix", "expert_parallel=8"]) == 0
    first = json.loads(capsys.readouterr().out)["layouts"][0]
    assert first["config"]["expert_parallel"] == 8
    assert first["seconds_by_kind"]["expert_parallel"] > 0


def test_context_parallelism_trades_memory_for_collectives():
    """The formulas do not depend on the layouts that the trainer supports."""
    model = get_model("llama2_7b", sequence_length=32768)
    layouts = Layouts.from_columns(context=[1, 2, 4], data=[4, 2, 1], level=3)
    memory, seconds = evaluate(model, cluster(4), Job(4), layouts)
    assert memory.activations[0] > memory.activations[1] > memory.activations[2]
    assert seconds.context_parallel[0] == 0 < seconds.context_parallel[1]
    np.testing.assert_allclose(memory.states, memory.states[0])  # Four devices always share them.


def test_context_parallelism_stores_no_scores():
    """Context-parallel attention is blockwise, so memory is linear in the sequence length."""

    def activations(length, **layout):
        model = get_model(SMALL, sequence_length=length)
        return evaluate(model, cluster(2), Job(2), Layouts.from_columns(**layout))[0].activations[0]

    assert activations(512, context=2) == pytest.approx(2 * activations(256, context=2), rel=0.01)
    assert activations(512, data=2) > 2.2 * activations(256, data=2)


def test_expert_parallelism_shards_weights():
    experts = MoEConfig(expert_num=8, num_experts_chosen=2)
    config = TransformerConfig(
        vocab_size=32000,
        hidden_size=1024,
        num_heads=16,
        num_layers=4,
        block=BlockConfig(moe_config=experts),
    )
    model = ModelShape("sparse", config, sequence_length=1024)
    memory, seconds = evaluate(
        model, cluster(8), Job(8), Layouts.from_columns(data=8, expert=[1, 8])
    )
    assert memory.weights[1] < memory.weights[0] / 2
    sharded, gathered = evaluate(
        model, cluster(8), Job(8), Layouts.from_columns(data=8, expert=[1, 8], level=3)
    )
    # All devices share the weights under level 3, with and without expert parallelism.
    np.testing.assert_allclose(sharded.weights[0], sharded.weights[1])
    assert seconds.expert_parallel[0] == 0 < seconds.expert_parallel[1]
    # Sharded experts are not gathered from other ranks.
    assert gathered.unsharding[1] < gathered.unsharding[0] / 2


def test_mesh_reduces_gradients_in_every_micro_batch():
    """Replicas on other ranks reduce once per step. Only ranks with the same experts reduce them."""
    model = get_model("llama2_7b")
    reduction = lambda **layout: (
        evaluate(model, cluster(2), Job(8), Layouts.from_columns(**layout))[1].reduction
    )
    item, four = reduction(context=2, micro_batches=[1, 4])
    assert four == pytest.approx(4 * item)
    item, four = reduction(data=2, local=2, micro_batches=[1, 4])
    assert four == pytest.approx(4 * item)
    item, four = reduction(data=2, level=1, micro_batches=[1, 4])
    assert four < 1.5 * item
    model = get_model("mixtral_8x7b")
    unsharded, sharded = reduction(data=2, local=2, expert=[1, 2])
    assert sharded < unsharded / 10


def test_pipeline_accumulates_full_gradients_or_shards():
    """Level 2 stores shards only if every micro-batch reduces its gradients. Level 3 always does."""
    model, job = get_model("llama2_7b"), Job(32, precision="float32")
    columns = {"level": [1, 2, 2, 3], "reduces": [0, 0, 1, 0]}
    layouts = Layouts.from_columns(stage=2, data=4, micro_batches=8, **columns)
    memory, seconds = evaluate(model, cluster(8), job, layouts)
    parameters = memory.weights[0] / 4
    np.testing.assert_allclose(memory.weights / parameters, [4, 4, 4, 1])
    np.testing.assert_allclose(memory.gradients / parameters, [4, 4, 1, 1])
    np.testing.assert_allclose(memory.states / parameters, [2, 2, 2, 2])
    # A ring of 4 ranks sends 3/4 of the bytes. The other seven micro-batches also reduce-scatter.
    layout = Layouts.from_columns(stage=2, data=4)
    group = device_groups(layout)["replicas"]
    (scatter,) = collective_seconds(cluster(8), "reduce-scatter", 4 * parameters, group)
    assert seconds.reduction[1] == pytest.approx(seconds.reduction[0])
    assert seconds.reduction[2] - seconds.reduction[1] == pytest.approx(7 * scatter, rel=1e-4)
    assert seconds.unsharding[3] > 0 == seconds.unsharding[2]


@pytest.mark.parametrize("precision, gradient_bytes", [("float32", 4), ("mixed_bfloat16", 2)])
def test_pipeline_holds_full_gradients_of_a_chunk(precision, gradient_bytes):
    """If every micro-batch reduces, all gradients of a chunk exist at the same time."""
    model, job = get_model("llama2_7b"), Job(32, precision=precision)
    columns = {"data": 4, "micro_batches": 8, "level": 2, "reduces": [0, 1, 1], "chunks": [1, 1, 2]}
    interleaved = SCHEDULE_NAMES.index("interleaved")
    layouts = Layouts.from_columns(stage=2, schedule=[0, 0, interleaved], **columns)
    memory, _ = evaluate(model, cluster(8), job, layouts)
    parameters = memory.weights / gradient_bytes
    full, chunk, half = memory.buffers
    assert full < chunk
    assert chunk == pytest.approx(gradient_bytes * parameters[1])
    assert half == pytest.approx(gradient_bytes * parameters[2] / 2)


def test_proposes_sharded_gradients_and_weights_in_pipelines():
    """With less memory, the best pipeline shards more."""
    model = get_model("llama2_7b")
    fixed = {"pipeline_stage": 2, "model_parallel": 1, "context_parallel": 1, "micro_batch_num": 8}
    proposed = []
    for gigabytes in (400, 75, 60):
        device = dataclasses.replace(get_device("h100"), memory_gb=gigabytes)
        result = plan(model, Cluster(device, 8), Job(32, precision="float32", fixed=fixed))
        config = result.best.config
        check_supported(config)
        proposed.append((config.optimizer_shard, config.gradient_accumulation_shard))
    assert proposed == [(0, False), (2, True), (3, False)]
    assert "optimizer_shard 2, reduced per micro-batch" in Layouts.from_columns(
        stage=2, data=4, level=2, reduces=1, micro_batches=8
    ).describe(0)


def ask(batch, **fixed):
    """Plan a small model on eight devices with fixed fields."""
    return plan(get_model(SMALL), cluster(8), Job(batch, fixed=fixed))


WRONG = [
    (lambda: get_model("gpt_9z"), "Unknown model 'gpt_9z'"),
    (lambda: get_device("b300"), "Unknown device 'b300', expected one of v100-16"),
    (lambda: get_model(SMALL, num_layers=0), "`num_layers` must be at least 1, got 0"),
    (lambda: get_model(SMALL, hidden_size=-1), "`hidden_size` must be at least 1, got -1"),
    (lambda: get_model(SMALL, moe_every=0), "`moe_every` must be at least 1, got 0"),
    (
        lambda: get_model(SMALL, moe_config={"expert_num": 2, "num_experts_chosen": 3}),
        "`num_experts_chosen=3` must not exceed `expert_num=2`",
    ),
    (
        lambda: get_model(SMALL, num_experts=2),
        "unknown field `num_experts`, got 2. Set experts in `moe_config`",
    ),
    (
        lambda: get_model(SMALL, sequence_length=0),
        "sequence_length must be an integer of at least 1",
    ),
    (lambda: get_model(SMALL, num_heads=7), "`num_heads=7` does not divide `hidden_size=768`"),
    (
        lambda: get_model(SMALL, adapter_rank=4, adapter_targets=("q_proj",)),
        "'q_proj' in `adapter_targets`, expected some of query, key, value, output, mapping,",
    ),
    (lambda: Cluster(get_device("a100"), 12), "not a multiple of `devices_per_node=8`"),
    (lambda: Job(0), "global_batch must be an integer of at least 1"),
    (lambda: Job(8, precision="fp8"), "`precision` must be one of float32"),
    (lambda: Job(8, optimizer="adm"), "`optimizer` must be one of sgd"),
    (
        lambda: plan(get_model(SMALL), cluster(8), Job(8, fixed={"model": 2})),
        "Unknown field 'model' in `fixed`",
    ),
    (
        lambda: plan(get_model(SMALL), cluster(8), Job(8, fixed={"model_parallel": 8})),
        "model_parallel=8 does not divide num_heads=12",
    ),
    (
        lambda: plan(get_model(SMALL), cluster(8), Job(8, fixed={"model_parallel": 3})),
        "model_parallel=3 does not divide 8 devices",
    ),
    (
        lambda: plan(get_model(SMALL), cluster(16), Job(16, fixed={"pipeline_stage": 16})),
        "pipeline_stage=16 is more than the 12 blocks",
    ),
    (lambda: ask(7, data_parallel=8), "global_batch=7 is not divisible by data_parallel=8. Use a"),
    (lambda: ask(8, micro_batch_num=3), "global_batch=8 is not divisible by micro_batch_num=3"),
    (lambda: ask(8, expert_parallel=2), "expert_parallel=2 does not divide num_experts=1"),
    (
        lambda: ask(8, pipeline_stage=4, micro_batch_num=2),
        "has pipeline_stage=4, micro_batch_num=2. Remove pipeline_stage or micro_batch_num.",
    ),
    (
        lambda: ask(8, optimizer_shard=2, data_parallel=1, context_parallel=1),
        "Remove optimizer_shard or data_parallel",
    ),
    (
        lambda: ask(8, pipeline_schedule="zb_h1", model_parallel=2, pipeline_stage=2),
        "No layout with these fixed fields is supported: ",
    ),
    (
        lambda: plan(get_model(SMALL, sequence_length=1001), cluster(16), Job(1)),
        "divides global_batch=1. Use a batch",
    ),
    (
        lambda: plan(get_model(SMALL), cluster(8), Job(8, fixed={"recompute": 3})),
        "fixed: recompute should be a valid boolean or",
    ),
    (
        lambda: cost(get_model(SMALL), cluster(8), Job(8), TransformerOpParallelConfig(3)),
        "data_parallel=3",
    ),
    (
        lambda: cost(
            get_model(SMALL), cluster(8), Job(8), TransformerOpParallelConfig(micro_batch_num=3)
        ),
        "global_batch=8 is not divisible by data_parallel=8 · micro_batch_num=3",
    ),
]


@pytest.mark.parametrize("ask, message", WRONG)
def test_invalid_input_raises_a_one_line_error(ask, message):
    with pytest.raises(InputError) as error:
        ask()
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("level", range(4))
@pytest.mark.parametrize("precision", ["mixed_bfloat16", "bfloat16"])
def test_frozen_weights_have_no_gradients_and_states(level, precision):
    job, devices = Job(64, precision), cluster(8)
    config = TransformerOpParallelConfig(micro_batch_num=8, optimizer_shard=level)
    full = cost(get_model("llama3_8b"), devices, job, config)
    adapters = cost(get_model("llama3_8b", adapter_rank=8), devices, job, config)
    half = cost(get_model("llama3_8b", frozen_blocks=16), devices, job, config)
    trained_bytes = lambda planned: (
        planned.bytes_by_kind["gradients"] + planned.bytes_by_kind["states"]
    )
    # Levels 1 and 2 in mixed precision keep float32 shards of frozen weights.
    frozen_bytes = 4 * 8.03e9 / 8 if level in (1, 2) and precision.startswith("mixed") else 0
    assert trained_bytes(adapters) == pytest.approx(frozen_bytes, abs=0.1e9)
    assert trained_bytes(adapters) < trained_bytes(half) < 0.75 * trained_bytes(full) + frozen_bytes
    assert adapters.bytes_by_kind["weights"] == pytest.approx(
        full.bytes_by_kind["weights"], rel=0.01
    )
    assert half.bytes_by_kind["activations"] < 0.6 * full.bytes_by_kind["activations"]
    for planned in (adapters, half):
        assert planned.step_seconds < 0.9 * full.step_seconds
        assert planned.flops_share < 0.7


@pytest.mark.parametrize("level", range(4))
def test_quantized_kernels_reduce_the_memory_of_weights(level):
    job, devices = Job(64, "mixed_bfloat16"), cluster(8)
    config = TransformerOpParallelConfig(micro_batch_num=8, optimizer_shard=level)
    weights = {
        kind: cost(get_model("llama3_8b", adapter_rank=8, base_dtype=kind), devices, job, config)
        for kind in (None, "nf4", "int8")
    }
    kernels = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    before = weights[None].bytes_by_kind["weights"]
    for kind, bytes_per_parameter in (("nf4", 0.516), ("int8", 1.016)):
        saved = before - weights[kind].bytes_by_kind["weights"]
        size = {0: 4, 1: 2, 2: 2, 3: 4}[level]
        expected = kernels * (size - bytes_per_parameter) / (8 if level == 3 else 1)
        assert saved == pytest.approx(expected, rel=1e-3)
    with pytest.raises(InputError, match="`base_dtype` requires adapters"):
        get_model("llama3_8b", base_dtype="nf4")
    with pytest.raises(InputError, match="`base_dtype` must be one of nf4, int8, got 'fp4'"):
        get_model("llama3_8b", adapter_rank=8, base_dtype="fp4")


@pytest.mark.parametrize("level", [0, 3])
@pytest.mark.parametrize("expert_parallel", [1, 8])
def test_quantized_experts_have_the_bytes_of_their_format(level, expert_parallel):
    config = TransformerOpParallelConfig(
        micro_batch_num=8, optimizer_shard=level, expert_parallel=expert_parallel
    )

    def bytes_by_kind(kind):
        model = get_model("mixtral_8x7b", adapter_rank=8, base_dtype=kind)
        return cost(model, cluster(8), Job(64, "bfloat16"), config).bytes_by_kind

    kernels = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024) / (8 if level == 3 else 1)
    experts = 32 * 8 * 3 * 4096 * 14336 / (8 if level == 3 else expert_parallel)
    saved = bytes_by_kind(None)["weights"] - bytes_by_kind("nf4")["weights"]
    assert saved == pytest.approx((kernels + experts) * (2 - 0.516), rel=1e-3)
    if level == 0:  # One kernel of the local experts, in float32 and in the type of products.
        buffers = bytes_by_kind("nf4")["buffers"] - bytes_by_kind(None)["buffers"]
        assert buffers == 8 / expert_parallel * 4096 * 14336 * (4 + 2)


@pytest.mark.parametrize("fields", [{"context_parallel": 8}, {"optimizer_shard": 3}])
def test_logits_have_the_size_of_a_chunk(fields):
    config = TransformerOpParallelConfig(micro_batch_num=1, **fields)
    model = get_model("llama3_8b", sequence_length=8192)
    logits = cost(model, cluster(8), Job(8, "bfloat16"), config).bytes_by_kind["logits"]
    tokens = 8192 * 8 / 8
    assert logits == MIN_CHUNK_TOKENS * 128256 * (2 + 2 * 4) + tokens * 4096 * 2


@pytest.mark.parametrize("level", [0, 1])
def test_muon_has_two_states_for_tables_and_one_for_blocks(level):
    model, devices = get_model("llama3_8b"), cluster(8)

    def state_bytes(optimizer):
        config = TransformerOpParallelConfig(optimizer_shard=level)
        return cost(model, devices, Job(64, "bfloat16", optimizer), config).bytes_by_kind["states"]

    one_state, two_states = state_bytes("lion"), state_bytes("adamw")
    tables = model.embedding_parameters() + model.head_parameters()
    expected = one_state + (two_states - one_state) * tables / model.parameters()
    assert state_bytes("muon") == pytest.approx(expected, rel=1e-3)
    assert one_state < expected < 0.6 * two_states


@pytest.mark.parametrize("level", range(4))
def test_states_in_bfloat16_need_half_the_bytes(level):
    """The averages of weights keep their type."""

    def state_bytes(dtype, averages=False):
        config = TransformerOpParallelConfig(optimizer_shard=level, optimizer_state_dtype=dtype)
        job = Job(64, "float32", averages=averages)
        return cost(get_model("llama3_8b"), cluster(8), job, config).bytes_by_kind["states"]

    narrow, wide = state_bytes("bfloat16"), state_bytes("float32")
    assert narrow == wide / 2 > 0
    assert state_bytes("bfloat16", averages=True) == pytest.approx(2 * narrow)
    job = Job(64, "float32", fixed={"optimizer_state_dtype": "bfloat16"})
    best = plan(get_model(SMALL), cluster(8), job).best
    assert best.config.optimizer_state_dtype == "bfloat16"


@pytest.mark.tensorflow
def test_adapters_match_network_counts():
    from dtransformer.models import CausalLM, add_lora, freeze

    sizes = dict(hidden_size=32, num_heads=4, num_kv_heads=2, gated=True, use_bias=False)
    dense = ("mapping", "gate", "projection")
    for targets in (("query", "value"), ("key", "output", "gate", "projection"), (*dense, "head")):
        network = CausalLM(100, num_layers=3, max_length=16, tied_head=False, **sizes)
        network.build()
        kind = "lora" if "query" in targets else "dora"
        patterns = [f"*{x}_kernel" if x != "head" else "head/kernel" for x in targets]
        add_lora(network, 4, targets=patterns, kind=kind)
        fields = {"adapter_rank": 4, "adapter_targets": targets, "adapter_kind": kind}
        model = from_network(network, **fields)
        count = sum(weight.shape.num_elements() for weight in network.trainable_variables)
        assert model.trained_parameters() == count
    network = CausalLM(100, num_layers=3, max_length=16, **sizes)
    network.build()
    freeze(network, ["embedding/*", "positions/*", "blocks/block_[0-1]/*"])
    model = from_network(network, frozen_blocks=2)
    count = sum(weight.shape.num_elements() for weight in network.trainable_variables)
    assert model.trained_parameters() == count


ASK = ["plan", "--model", "llama2-13b", "--nodes", "4", "--device", "h100", "--global-batch", "256"]


def test_command_prints_a_table_and_writes_a_config(capsys, tmp_path):
    assert main([*ASK, "--yaml", str(tmp_path / "plan.yaml")]) == 0
    printed = capsys.readouterr().out
    assert "32 × h100-80 (4 nodes of 8)" in printed and "Recommended: layout 1. " in printed
    config = load_config(tmp_path / "plan.yaml").parallel
    assert config.resolve(32) == config
    check_supported(config)


@pytest.mark.parametrize("example", EXAMPLE.findall(PAGE))
def test_docs_show_the_printed_output(capsys, example):
    assert main(example[0].split()) == 0
    assert capsys.readouterr().out.strip() == example[1].strip()


def test_json_names_contain_units(capsys):
    assert main([*ASK, "--json", "--top", "2", "--fix", "model_parallel=2"]) == 0
    content = json.loads(capsys.readouterr().out)
    first, _ = content["layouts"]
    assert content["fits"] and first["config"]["model_parallel"] == 2
    assert first["memory_bytes"] <= first["available_bytes"]
    assert sum(first["seconds_by_kind"].values()) == pytest.approx(first["step_seconds"])


def test_masked_language_models_have_logits_at_masked_positions(capsys):
    logits = {}
    for positions in (None, 77, 512):
        options = {} if positions is None else {"predicted_positions": positions}
        shape = get_model("bert_base", sequence_length=512, **options)
        config = TransformerOpParallelConfig(data_parallel=8)
        logits[positions] = cost(shape, cluster(8), Job(8), config).bytes_by_kind["logits"]
    ask = ["plan", "--model", "bert-base", "--devices", "8", "--global-batch", "8", "--json"]
    assert main([*ask, "--device", "a100", "--fix", "data_parallel=8", "optimizer_shard=0"]) == 0
    layouts = json.loads(capsys.readouterr().out)["layouts"]
    (planned,) = [
        x["bytes_by_kind"]["logits"]
        for x in layouts
        if x["micro_batch"] == 1 and "recompute" not in x["config"]
    ]
    assert planned == logits[77] < logits[512] == logits[None]


def test_custom_model_and_device(capsys, tmp_path):
    model = {"hidden_size": 512, "num_heads": 8, "num_layers": 4, "vocab_size": 1000}
    model |= {"sequence_length": 128}
    device = {"name": "mine", "tflops_16_bit": 1, "tflops_32_bit": 1, "memory_gb": 4}
    device |= {"memory_gb_per_second": 20, "inside_gb_per_second": 1, "between_gb_per_second": 1}
    device |= {"devices_per_node": 2, "links": {"data": {"gb_per_second": 2, "latency_us": 5}}}
    for name, fields in {"model": model, "device": device}.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(fields))
    ask = [
        "plan",
        "--model",
        str(tmp_path / "model.yaml"),
        "--device",
        str(tmp_path / "device.yaml"),
    ]
    assert main([*ask, "--devices", "2", "--global-batch", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["device"] == "mine"


def test_named_device_with_changed_links(capsys, tmp_path):
    path = tmp_path / "slow.yaml"
    path.write_text("base: a100\nbetween_gb_per_second: 1\nconstants: {hop_us: 50}\n")
    ask = ["plan", "--model", "gpt-7.5b", "--devices", "64", "--global-batch", "512", "--json"]
    assert main([*ask, "--device", str(path)]) == 0
    slow = json.loads(capsys.readouterr().out)["layouts"][0]
    assert main([*ask, "--device", "a100"]) == 0
    assert json.loads(capsys.readouterr().out)["layouts"][0]["step_seconds"] < slow["step_seconds"]
    path.write_text("base: a100\nnetwork: 1\n")
    assert main([*ask, "--device", str(path)]) == 2
    assert "Device has no field 'network'. Its fields are name, " in capsys.readouterr().err


def test_changed_model_is_titled_by_its_name(capsys, tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text("base: llama2_7b\nname: mine\nnum_layers: 4\n")
    ask = ["plan", "--model", str(path), "--devices", "8", "--global-batch", "64"]
    assert main(ask) == 0
    assert capsys.readouterr().out.startswith("mine: 1.07 B parameters, ")
    assert main([*ask, "--lora", "8", "--precision", "bfloat16"]) == 0
    assert ", 524,288 of them trained" in capsys.readouterr().out


@pytest.mark.tensorflow
def test_plans_a_published_folder(capsys, tmp_path):
    """The planner reads only the config, so the folder does not need weights."""
    config = {"model_type": "llama", "vocab_size": 32000, "hidden_size": 4096}
    config |= {"intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
    config |= {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
    folder = tmp_path / "my-llama"
    folder.mkdir()
    ask = ["plan", "--model", str(folder), "--devices", "8", "--global-batch", "64", "--json"]
    assert main(ask) == 2
    assert "config.json does not exist" in capsys.readouterr().err
    (folder / "config.json").write_text(json.dumps(config))
    assert main(ask) == 0
    from_folder = json.loads(capsys.readouterr().out)
    assert from_folder["model"]["name"] == "my-llama"
    assert main([*ask[:2], "llama2-7b", *ask[3:]]) == 0
    preset = json.loads(capsys.readouterr().out)
    assert from_folder["layouts"] == preset["layouts"]
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 131072}))
    for option, length in (([], 8192), (["--sequence", "16384"], 16384)):
        assert main([*ask, *option]) == 0
        assert json.loads(capsys.readouterr().out)["model"]["sequence_length"] == length


def test_yaml_recreates_the_config(gpt3_plan):
    job = Job(64, fixed={"recompute": {"select": ["attention"]}})
    for result in (gpt3_plan, plan(get_model(SMALL), cluster(8), job)):
        fields = yaml.safe_load(plan_to_yaml(result))["parallel"]
        assert TransformerOpParallelConfig(**fields) == result.best.config


# Families without a preset.
NO_PRESETS = {
    *("seed_oss", "granite", "olmo3", "olmoe", "glm4_moe", "camembert", "mbart", "pegasus", "mt5"),
    *("hunyuan_v1_dense", "apertus"),
}


@pytest.mark.tensorflow
def test_every_supported_family_has_a_preset():
    from dtransformer.models.pretrained.families import FAMILIES

    for family in FAMILIES.keys() - NO_PRESETS:
        name = PRESET_PATTERNS.get(family, f"{family}_")
        assert any(re.match(name, preset) for preset in ARCHITECTURES), family


def test_writes_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    assert main([*ASK, "--json", "--plot", str(tmp_path / "plan.png")]) == 0
    assert (tmp_path / "plan.png").read_bytes()[1:4] == b"PNG"


def test_picture_without_matplotlib_is_a_one_line_error(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main([*ASK, "--plot", "plan.png"]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


def plan_on_cpus(model, ranks, fields, **config):
    """Return the cost of a small job on CPUs whose device has the given fields."""
    device = dataclasses.replace(cpu_device(ranks, 16, ranks), **fields)
    job = Job(16, "float32", "adam")
    return cost(model, Cluster(device, ranks, ranks), job, TransformerOpParallelConfig(**config))


def test_ranks_that_share_a_core_have_shorter_bubbles():
    """With four stages on two cores, a core waits like one of two stages plus a third of a pass."""
    model = get_model(SMALL, num_layers=4, sequence_length=64)
    alone, shared = (
        plan_on_cpus(model, 4, {"sharing": sharing}, pipeline_stage=4, micro_batch_num=4)
        for sharing in (1.0, 2.0)
    )
    waits = [cost.seconds_by_kind["bubble"] for cost in (alone, shared)]
    assert waits[0] / waits[1] == pytest.approx(3 / (4 / 3))
    # Each core has one stage of both replicas.
    of_replicas = plan_on_cpus(
        model, 4, {"sharing": 2.0}, data_parallel=2, pipeline_stage=2, micro_batch_num=4
    )
    assert of_replicas.seconds_by_kind["bubble"] > 0
    assert cpu_device(2, 16, 4).sharing == 2 and cpu_device(4, 16, 2).sharing == 1


def test_every_waiting_collective_costs_a_call():
    """Sharded states also exchange sizes, norms and new weights: three more calls of 5 ms."""
    model = get_model(SMALL, num_layers=4, sequence_length=64)
    links = {"data": Link(1.0, 0.0, 5000.0)}
    unsharded, sharded = (
        plan_on_cpus(model, 2, {"links": links}, optimizer_shard=level) for level in (0, 1)
    )
    more = sharded.seconds_by_kind["reduction"] - unsharded.seconds_by_kind["reduction"]
    assert more == pytest.approx(3 * 0.005)


def test_pipeline_all_reduces_a_tied_table():
    links = {"data": Link(1.0, 0.0, 0.0), "stage": Link(1.0, 0.0, 0.0)}
    tied, untied = (
        plan_on_cpus(get_model(SMALL, tied_head=tied), 2, {"links": links}, pipeline_stage=2)
        for tied in (True, False)
    )
    model = get_model(SMALL)
    more = tied.seconds_by_kind["reduction"] - untied.seconds_by_kind["reduction"]
    assert more == pytest.approx(model.config.vocab_size * model.config.hidden_size * 4 / 1e9)


def test_mesh_sums_embeddings_and_head():
    """In addition to blocks, the mesh sums looked-up rows, the head's gradient and token counts."""
    model = get_model(SMALL, num_layers=4, sequence_length=64)
    links = {"data": Link(1.0, 0.0, 0.0), "model": Link(1e9, 0.0, 1000.0)}
    result = plan_on_cpus(model, 2, {"links": links}, model_parallel=2, vocab_emb_dp=False)
    calls = 4 * 4 + 1 + 1 + 5
    assert result.seconds_by_kind["model_parallel"] == pytest.approx(calls * 0.001)


def test_mesh_sends_bfloat16_as_float32():
    model, layouts = get_model("llama2_7b"), Layouts.from_columns(model=[2])
    seconds = {
        precision: evaluate(model, cluster(2), Job(8, precision), layouts)[1].model_parallel[0]
        for precision in ("mixed_float16", "mixed_bfloat16", "float32")
    }
    assert seconds["mixed_bfloat16"] == seconds["float32"] > 1.5 * seconds["mixed_float16"]


def test_default_precision_depends_on_the_device():
    """A V100 lacks bfloat16, so its mixed precision is float16 and bfloat16 raises an error."""
    model, job = get_model("gpt2_small"), Job(global_batch=8)
    for device, precision in (("v100", "mixed_float16"), ("a100", "mixed_bfloat16")):
        result = plan(model, Cluster(get_device(device), 2), job)
        assert result.job.precision == precision and precision in report.plan_to_text(result)
    unsupported = Job(global_batch=8, precision="mixed_bfloat16")
    cluster = Cluster(get_device("v100"), 2)
    for call in (
        lambda: plan(model, cluster, unsupported),
        lambda: cost(model, cluster, unsupported, TransformerOpParallelConfig()),
    ):
        with pytest.raises(
            InputError,
            match="v100-32 does not support the precision mixed_bfloat16. Use mixed_float16",
        ):
            call()


def test_states_are_sharded_over_different_meshes_only():
    model, job = get_model("llama2_7b", sequence_length=32768), Job(1)
    cost_with = lambda **fields: cost(
        model, cluster(8, "h100"), job, TransformerOpParallelConfig(**fields)
    )
    unsharded = cost_with(context_parallel=8).bytes_by_kind
    assert (
        cost_with(context_parallel=8, optimizer_shard=2).bytes_by_kind["states"]
        == unsharded["states"]
    )
    assert (
        cost_with(context_parallel=8, optimizer_shard=3).bytes_by_kind["states"]
        < unsharded["states"] / 7
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_enumerated_layouts_are_valid_topologies(ranks):
    devices = dataclasses.replace(cluster(8 * ranks, "h100"), local_devices=8)
    layouts = enumerate_layouts(get_model("llama2_7b"), devices, Job(16))
    for index in range(0, len(layouts), 97):
        topology = Topology.from_config(layouts.config(index), ranks, 8)
        if layouts.level[index]:
            assert max(len(topology.data_parallel_group(0)), topology.mesh_spans_data * 2) > 1


@pytest.mark.parametrize("optimizer", ["adafactor", "lamb", "muon"])
def test_full_weight_optimizers_get_whole_partitions(optimizer):
    result = plan(get_model("llama2_7b"), cluster(8, "h100"), Job(64, optimizer=optimizer), top=40)
    for config in (planned.config for planned in result.costs):
        is_whole = config.optimizer_shard in (1, 2)
        assert (config.optimizer_shard_partition == "whole") == is_whole
        assert config.optimizer_shard != 3 and (is_whole or config.model_parallel == 1)


def test_no_layout_fits_on_part_of_a_node():
    assert "No layout of 6 devices fits" in plan(get_model("gpt_175b"), cluster(6), Job(96)).why
