"""Host lists are checked, failed hosts are excluded for a while, and causes are reported."""

import pytest

from dtransformer.cli.launching.hosts import HostBook, parse_hosts, take_ranks
from dtransformer.cli.launching.supervisor import PREEMPTED, REFUSED, Outcome
from dtransformer.errors import InputError
from dtransformer.parallel.config.config import TransformerOpParallelConfig
from dtransformer.parallel.config.elastic_config import FITS_LAYOUT, refit
from dtransformer.parallel.config.topology import Topology
from dtransformer.parallel.config.validators import check_supported
from dtransformer.parallel.runtime.launch import fit_to_devices
from dtransformer.runs.config import load_config
from dtransformer.runs.run import layout_plan


@pytest.mark.parametrize("text", [
    "", "# none\n\n", "a slots=0", "a slots=99999", "a:b", "a b", "-o ProxyCommand=x", "a;b", "a\na:2",
    "a slots=2 b", "é", "a\x00", "$(id)",
])  # fmt: skip
def test_rejects_invalid_host_lines(text):
    """Hosts become arguments of ssh and horovodrun."""
    with pytest.raises(InputError, match="hosts.txt.*such as 'node1 slots=4'"):
        parse_hosts(text, "hosts.txt")


def test_retries_excluded_hosts_after_the_cool_down():
    hosts, book = {"a": 2, "b": 2}, HostBook(cool_down=60)
    book.failed("b", now=100.0)
    assert book.usable(hosts, 159.0) == {"a": 2}
    assert book.usable(hosts, 160.0) == hosts


def test_excludes_hosts_after_two_consecutive_faults():
    hosts, book = {"a": 1, "b": 1}, HostBook(cool_down=60)
    for at_fault in (["b"], ["a"], [], ["b"]):
        book.at_fault(at_fault, now=0.0)
        assert book.usable(hosts, 1.0) == hosts
    book.at_fault(["b"], now=0.0)
    assert book.usable(hosts, 1.0) == {"a": 1}
    assert book.usable(hosts, 61.0) == hosts


def test_uses_new_hosts():
    assert take_ranks(parse_hosts("a:2\nb:2\nc:2", "x"), 5) == {"a": 2, "b": 2, "c": 1}


# Printed lines, and the expected cause, hosts, preempted and refused.
OUTPUTS = {
    "a frozen rank": (
        [
            "[0]<stderr>:dtransformer: the job ends: ranks 2, 3 on host b: no heartbeat for 26 s, "
            "last in step 5: frozen or unreachable; rank 0 on host a was in step 6\n",
            "Process name: 0\n",
            "Exit code: 1\n",
        ],
        ("ranks 2, 3 on host b: no heartbeat for 26 s", ("b",), False, False),
    ),
    "several hosts": (
        ["x dtransformer: the job ends: ranks 1, 2 on hosts a, b: ended in step 5; and so on\n"],
        ("ranks 1, 2 on hosts a, b: ended in step 5", ("a", "b"), False, False),
    ),
    "no rank is at fault": (
        [
            "[1]<stderr>:urllib3: Connection refused\n",
            "[0]<stderr>:dtransformer: the job ends: no rank made progress in step 5: "
            "their calls differ; x\n",
        ],
        ("no rank made progress in step 5: their calls differ", (), False, False),
    ),
    "a rank cannot reach what is not ours": (
        ["[1]<stderr>:urllib3: Connection refused\n", "Exit code: 1\n"],
        ("a rank has ended with code 1", (), False, False),
    ),
    "preempted": (["Exit code: 75\n"], ("asked to stop", (), True, False)),
    "refused": (["Exit code: 2\n"], ("ended with code 2", (), False, True)),
    "killed": (["Process name: 1\n", "Exit code: 137\n"], ("code 137", (), False, False)),
    "nothing": ([], ("horovodrun has failed", (), False, False)),
    "a program that prints the like": (["Exit code: x\n"], ("has failed", (), False, False)),
}


@pytest.mark.parametrize("lines, expected", OUTPUTS.values(), ids=OUTPUTS)
def test_outcome_names_the_cause(lines, expected):
    outcome = Outcome()
    for line in lines:
        outcome.read(line)
    cause, *rest = expected
    assert cause in str(outcome)
    result = outcome.exit_code == PREEMPTED, outcome.exit_code == REFUSED
    assert [outcome.hosts, *result] == rest


# Degrees (data, model, pipeline), remaining devices, and expected degrees.
REFITS = [
    ((4, 1, 1), 3, (3, 1, 1)),
    ((2, 2, 1), 4, (2, 2, 1)),
    ((2, 2, 1), 2, (1, 2, 1)),
    ((2, 2, 1), 3, (3, 1, 1)),
    ((1, 4, 1), 2, (1, 2, 1)),
    ((1, 4, 1), 6, (3, 2, 1)),
    ((2, 1, 2), 2, (1, 1, 2)),
    ((1, 1, 4), 2, (1, 1, 2)),
    ((1, 2, 2), 2, (1, 2, 1)),
    ((2, 2, 2), 16, (4, 2, 2)),
    ((None, 2, 1), 6, (None, 2, 1)),
    ((None, 2, 1), 3, (None, 1, 1)),
]


@pytest.mark.parametrize("degrees, num_devices, expected", REFITS)
def test_refits_the_layout_to_fewer_devices(degrees, num_devices, expected):
    data, model, stages = degrees
    config = TransformerOpParallelConfig(
        data_parallel=data,
        model_parallel=model,
        pipeline_stage=stages,
        micro_batch_num=4,
        optimizer_shard=2,
    )
    result = refit(config, num_devices)
    assert (result.data_parallel, result.model_parallel, result.pipeline_stage) == expected
    assert (result.micro_batch_num, result.optimizer_shard) == (4, 2), "all else stays"
    result.resolve(num_devices)


def test_refit_to_one_stage_removes_pipeline_chunks():
    config = TransformerOpParallelConfig(
        pipeline_stage=2, pipeline_chunks=2, pipeline_schedule="interleaved", micro_batch_num=4
    )
    result = refit(config, 1)
    assert (result.pipeline_stage, result.pipeline_chunks, result.pipeline_schedule) == (
        1,
        1,
        "1f1b",
    )


@pytest.mark.parametrize(
    "level, left, experts", [(0, 3, 1), (0, 6, 2), (0, 4, 4), (3, 6, 1), (3, 4, 4)]
)
def test_refit_reduces_expert_parallel(level, left, experts):
    config = TransformerOpParallelConfig(data_parallel=4, expert_parallel=4, optimizer_shard=level)
    result = refit(config, left)
    assert (result.data_parallel, result.expert_parallel) == (left, experts)
    Topology.from_config(result, left)


@pytest.mark.parametrize("left, context, ulysses_shards", [(8, 8, 4), (6, 2, 2), (3, 1, 1)])
def test_refit_keeps_ulysses_shards_a_divisor(left, context, ulysses_shards):
    config = TransformerOpParallelConfig(
        context_parallel=8, context_parallel_mode="ulysses_ring", ulysses_shards=4
    )
    result = refit(config, left)
    assert (result.context_parallel, result.ulysses_shards) == (context, ulysses_shards)
    check_supported(result)


def plan_for(ranks, monkeypatch, *settings, launched="3"):
    """Return the plan of a run with a layout for four ranks on fewer remaining ranks."""
    layout = ["data_parallel=2", "model_parallel=2", "gradient_dtype=float16"]
    config = load_config(None, [*(f"parallel.{field}" for field in layout), *settings])
    monkeypatch.setenv("HOROVOD_SIZE", str(ranks))
    monkeypatch.setenv("HOROVOD_LOCAL_SIZE", str(ranks))
    if launched:
        monkeypatch.setenv(FITS_LAYOUT, launched)
    return layout_plan(config)


def test_planner_chooses_the_layout_of_fewer_ranks(monkeypatch):
    """The plan is for the run's model and batch, keeps other fields, and `init` accepts it."""
    result = plan_for(3, monkeypatch)
    best = result.best.config
    assert result.cluster.num_devices == 3 and best.gradient_dtype == "float16"
    best.resolve(3)
    assert fit_to_devices(best, 3) == best
    value = TransformerOpParallelConfig(data_parallel=2, model_parallel=2, gradient_dtype="float16")
    assert fit_to_devices(value, 3) == refit(value, 3)
    monkeypatch.delenv(FITS_LAYOUT)
    assert fit_to_devices(value, 3) == value


@pytest.mark.parametrize("ranks, launched, settings", [
    (4, "4", []),  # All ranks remain.
    (3, "", []),  # `init` rejects it.
    (3, "2", []),  # Two ranks on one host, and one on another.
    (3, "3", ["training.optimizer=nonsense"]),
])  # fmt: skip
def test_layout_plan_is_none_without_a_planner_layout(ranks, launched, settings, monkeypatch):
    assert plan_for(ranks, monkeypatch, *settings, launched=launched) is None
