"""`init` joins a job of one process, rejects invalid layouts and derives seeds."""

import sys
import threading

import pytest

import dtransformer
from dtransformer import TransformerOpParallelConfig, TransformerRecomputeConfig
from dtransformer.parallel.config import validators
from dtransformer.parallel.config.topology import Topology
from dtransformer.parallel.runtime import job, seeds


@pytest.fixture(autouse=True)
def leave_the_job():
    yield
    dtransformer.shutdown()


def test_init_and_shutdown_in_one_process():
    assert not job.is_initialized()
    topology = dtransformer.init(seed=7)
    assert job.is_initialized()
    assert topology == Topology() == job.topology() and str(topology) == "one rank"
    assert (dtransformer.rank(), dtransformer.size(), dtransformer.local_rank()) == (0, 1, 0)
    assert dtransformer.is_chief()
    assert job.data_shard() == (0, 1)
    assert job.seed() == 7
    assert dtransformer.get_parallel_config().data_parallel == 1, "init must set data_parallel"
    job.barrier()  # returns immediately
    dtransformer.shutdown()
    assert not job.is_initialized()
    dtransformer.shutdown()  # a second time does nothing
    dtransformer.init()  # joins a job again
    assert dtransformer.rank() == 0


def test_rank_and_size_before_init():
    assert (dtransformer.rank(), dtransformer.size(), dtransformer.is_chief()) == (0, 1, True)
    assert job.data_shard() == (0, 1)


def test_init_sets_the_global_config():
    config = TransformerOpParallelConfig(gradient_aggregation_group=2, vocab_emb_dp=False)
    dtransformer.init(config)
    expected = TransformerOpParallelConfig(
        data_parallel=1, gradient_aggregation_group=2, vocab_emb_dp=False
    )
    assert dtransformer.get_parallel_config() == expected
    assert config.data_parallel is None, "init must not change its argument"


def test_alone_affects_only_its_thread():
    dtransformer.init(seed=7)
    results = []
    with job.alone():
        assert job.current() is not job._job and job.seed() == 7
        thread = threading.Thread(target=lambda: results.append(job.current() is job._job))
        thread.start()
        thread.join()
    assert results == [True] and job.current() is job._job


def test_rejected_layout_keeps_the_old_mesh():
    dtransformer.init(TransformerOpParallelConfig(model_parallel=2), local_devices=2)
    mesh = job.mesh()
    with pytest.raises(ValueError, match="model_parallel"):
        dtransformer.init(TransformerOpParallelConfig(model_parallel=3), local_devices=2)
    assert job.mesh() is mesh and mesh is not None


def test_rejects_sharded_accumulation_at_level_1():
    config = TransformerOpParallelConfig(gradient_accumulation_shard=True, optimizer_shard=1)
    with pytest.raises(ValueError, match="does not work with `optimizer_shard=1`.*=2` or `3`"):
        validators.check_supported(config)


def test_init_without_a_seed_keeps_the_old_seed():
    dtransformer.set_seed(11)
    dtransformer.init()
    assert job.seed() == 11


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"data_parallel": 2}, ["data_parallel=2", "2 ranks", "has 1"]),
        ({"model_parallel": 4}, ["model_parallel=4", "4 ranks", "has 1"]),
        ({"data_parallel": 2, "pipeline_stage": 3}, ["pipeline_stage=3", "6 ranks", "has 1"]),
    ],
)
def test_rejects_a_layout_that_does_not_fit_the_ranks(fields, words):
    before = dtransformer.get_parallel_config()
    with pytest.raises(ValueError) as caught:
        dtransformer.init(TransformerOpParallelConfig(**fields))
    assert all(word in str(caught.value) for word in words)
    assert "dtransformer launch -np" in str(caught.value) and "\n" not in str(caught.value)
    assert not job.is_initialized()
    assert dtransformer.get_parallel_config() is before


def test_messages_explain_how_to_install_horovod(monkeypatch):
    for name in ("horovod", "horovod.tensorflow"):
        monkeypatch.setitem(sys.modules, name, None)  # Python's way to say that it is not there
    with pytest.raises(ValueError, match="dtransformer launch -np 2` .*doctor --install-horovod"):
        dtransformer.init(TransformerOpParallelConfig(data_parallel=2))
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    with pytest.raises(ValueError, match="HOROVOD_SIZE='2'.*Start with `dtransformer launch`"):
        dtransformer.init()
    monkeypatch.setenv("HOROVOD_RANK", "0")
    monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_ADDR", "127.0.0.1")
    with pytest.raises(RuntimeError, match="2 ranks.*Run 'dtransformer doctor --install-horovod'"):
        dtransformer.init()
    assert not job.is_initialized()


def test_rejects_processes_of_other_launchers(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "1")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    with pytest.raises(ValueError, match="srun has started .*NUM_TASKS='4'.*dtransformer launch"):
        dtransformer.init()
    assert not job.is_initialized()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"data_parallel": 8},
        {"optimizer_shard": 0},
        {"optimizer_shard": 3},
        {"optimizer_shard": True, "optimizer_shard_partition": "whole"},
        {"recompute": TransformerRecomputeConfig(select=("norm",))},
        {"micro_batch_num": 4},
        {"context_parallel": 2, "model_parallel": 2},
        {"context_parallel": 2, "sequence_parallel": True},
        {"pipeline_stage": 2, "micro_batch_num": 4},
        {"pipeline_stage": 2, "micro_batch_num": 4, "optimizer_shard": True},
        {"pipeline_stage": 2, "micro_batch_num": 4, "model_parallel": 2, "optimizer_shard": 2},
        {"pipeline_stage": 2, "micro_batch_num": 4, "model_parallel": 2, "optimizer_shard": 3},
        {
            "pipeline_stage": 2,
            "micro_batch_num": 2,
            "pipeline_schedule": "zb_h1",
            "optimizer_shard": 2,
            "gradient_accumulation_shard": True,
        },
        {"vocab_emb_dp": False, "gradient_aggregation_group": 1},
    ],
    ids=str,
)
def test_accepts_supported_configs(fields):
    validators.check_supported(TransformerOpParallelConfig(**fields))


@pytest.mark.parametrize("level", [False, 3])
def test_rejects_levels_without_owners_of_whole_weights(level):
    config = TransformerOpParallelConfig(optimizer_shard_partition="whole", optimizer_shard=level)
    with pytest.raises(
        ValueError, match=f"'whole'.*={level}`, because .*Set `optimizer_shard=1` or `2`"
    ):
        validators.check_supported(config)


@pytest.mark.parametrize(
    "fields, words",
    [
        (
            {"context_parallel": 4},
            "does not work with `context_parallel_mode='auto'`.*ulysses_ring",
        ),
        (
            {"context_parallel": 3, "context_parallel_mode": "ulysses_ring"},
            "must divide `context_parallel=3`",
        ),
    ],
)
def test_rejects_ulysses_shards_that_would_have_no_effect(fields, words):
    config = TransformerOpParallelConfig(ulysses_shards=2, **fields)
    with pytest.raises(ValueError, match=f"`ulysses_shards=2` {words}"):
        validators.check_supported(config)


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"pipeline_stage": 4, "micro_batch_num": 2}, "`micro_batch_num=2` is less than"),
        ({"pipeline_stage": 2, "micro_batch_num": 2, "pipeline_chunks": 2}, "'interleaved'"),
        (
            {
                "pipeline_stage": 2,
                "micro_batch_num": 2,
                "model_parallel": 2,
                "pipeline_schedule": "zb_h1",
            },
            "needs stages of one device.* model_parallel=2",
        ),
        (
            {
                "pipeline_stage": 2,
                "micro_batch_num": 2,
                "context_parallel": 2,
                "pipeline_schedule": "zb_h1",
            },
            "needs stages of one device.* context_parallel=2",
        ),
    ],
    ids=str,
)
def test_rejects_impossible_pipelines(fields, words):
    with pytest.raises(ValueError, match=words):
        validators.check_supported(TransformerOpParallelConfig(**fields))


def test_rejects_sequences_sharded_twice():
    fields = {"context_parallel": 2, "model_parallel": 2, "sequence_parallel": True}
    with pytest.raises(ValueError, match="sequence_parallel=True.*context_parallel=2.*Set"):
        validators.check_supported(TransformerOpParallelConfig(**fields))


def test_rejected_init_does_not_initialize_the_job():
    with pytest.raises(ValueError, match="`expert_parallel=2` must divide `data_parallel=1`"):
        dtransformer.init(TransformerOpParallelConfig(expert_parallel=2))
    assert not job.is_initialized()
    assert dtransformer.get_parallel_config().expert_parallel == 1


@pytest.mark.parametrize("config", [{"model_parallel": 1}, 4, TransformerRecomputeConfig()])
def test_init_rejects_configs_of_other_types(config):
    with pytest.raises(TypeError, match="TransformerOpParallelConfig"):
        dtransformer.init(config)
    assert not job.is_initialized()


@pytest.mark.parametrize("value", [0, 1, 2**31, 2**63])
def test_accepts_valid_seeds(value):
    dtransformer.set_seed(value)
    assert job.seed() == value
    assert 0 <= seeds.derived_seed("a weight") < 2**31


@pytest.mark.parametrize("value", ["1", None, 1.0, True, -1])
def test_rejects_invalid_seeds_and_keeps_the_old_one(value):
    dtransformer.set_seed(5)
    with pytest.raises(ValueError, match=f"seed.*{value}"):
        dtransformer.set_seed(value)
    assert job.seed() == 5


@pytest.mark.parametrize("value", ["1", True, -1])
def test_init_with_an_invalid_seed_changes_nothing(value):
    with pytest.raises(ValueError, match="seed"):
        dtransformer.init(TransformerOpParallelConfig(gradient_aggregation_group=2), seed=value)
    assert not job.is_initialized()
    assert dtransformer.get_parallel_config() == TransformerOpParallelConfig()


def test_derived_seeds_depend_only_on_the_seed_and_the_names():
    names = [("a",), ("b",), ("a", "b"), ("ab",), ("b", "a"), ("a", 1), ("a", "1")]
    derived = {}
    for seed in (0, 1, 2):
        dtransformer.set_seed(seed)
        derived[seed] = [seeds.derived_seed(*name) for name in names]
        with dtransformer.parallel_config(model_parallel=4):
            assert derived[seed] == [seeds.derived_seed(*name) for name in names]
    assert len({seed for seeds in derived.values() for seed in seeds}) == 3 * len(names)


def test_derived_seeds_never_change():
    """A change would make runs of earlier versions irreproducible."""
    dtransformer.set_seed(0)
    assert seeds.derived_seed("transformer/encoder/block_0/attention/query_kernel") == 1354898919
