"""The automatic mode plans a layout for the running job on this machine."""

import dataclasses
import os

import pytest

from dtransformer.errors import InputError
from dtransformer.parallel.config.validators import check_supported
from dtransformer.planner.automatic import auto_config, automatic_plan
from dtransformer.planner.machine import cpu_device, find_gpu, this_cluster
from dtransformer.runs.automatic import plan_run
from dtransformer.runs.config import load_config

FOUR_RANKS = {"HOROVOD_SIZE": "4", "HOROVOD_LOCAL_SIZE": "2", "HOROVOD_RANK": "3"}


def test_cluster_has_all_devices_of_the_job(monkeypatch):
    for name, value in FOUR_RANKS.items():
        monkeypatch.setenv(name, value)
    detected = this_cluster(local_devices=2)
    assert (detected.num_devices, detected.devices_per_node) == (8, 4)
    config = auto_config("gpt2_small", 16)
    assert config.resolve(4) == config
    check_supported(config)


def test_all_ranks_get_the_same_layout_and_rank_0_prints_it(monkeypatch, capsys):
    configs = []
    for rank in "0123":
        for name, value in {**FOUR_RANKS, "HOROVOD_RANK": rank}.items():
            monkeypatch.setenv(name, value)
        configs.append(auto_config("gpt2_small", 16, device="a100"))
    assert all(config == configs[0] for config in configs)
    printed = capsys.readouterr().out
    assert printed.count("Layout: ") == 1 and "Chosen by the planner: " in printed


@pytest.mark.tensorflow
def test_plans_for_an_unbuilt_network():
    from dtransformer.models import CausalLM

    network = CausalLM(100, hidden_size=32, num_heads=4, num_layers=2, max_length=16)
    assert auto_config(network, 8).data_parallel == 1
    assert not network.weights


def test_keeps_fixed_fields(monkeypatch):
    for name, value in FOUR_RANKS.items():
        monkeypatch.setenv(name, value)
    options = {"device": "a100", "fixed": {"pipeline_stage": 2, "pipeline_schedule": "gpipe"}}
    config = auto_config("gpt2_small", 16, **options)
    assert (config.pipeline_stage, config.pipeline_schedule) == (2, "gpipe")


def test_error_is_one_line_if_nothing_fits():
    with pytest.raises(InputError) as error:
        automatic_plan("gpt_175b", 8, device="a100")
    assert "bytes more than" in str(error.value) and "\n" not in str(error.value)


def test_finds_gpus_by_driver_name():
    names = {"NVIDIA A100-SXM4-40GB": "a100-40", "NVIDIA H100 80GB HBM3": "h100-80"}
    names |= {"Tesla V100-SXM2-16GB": "v100-16", "NVIDIA H200": "h200-141"}
    for name, expected in names.items():
        assert find_gpu(name).name == expected
    for name in ("NVIDIA L40S", "NVIDIA RTX A1000", "NVIDIA GH200 480GB"):
        with pytest.raises(InputError, match=f"no figures for the GPU '{name}'. Measure it"):
            find_gpu(name)


def test_ranks_share_cores_and_memory_of_a_host():
    alone, four = (cpu_device(8, 64, ranks) for ranks in (1, 4))
    for field in ("tflops_32_bit", "memory_gb", "memory_gb_per_second"):
        assert getattr(alone, field) == 4 * getattr(four, field)
    assert dataclasses.replace(four, devices_per_node=1).devices_per_node == 1


@pytest.mark.parametrize("text", ["parallel: auto", "training: {layout: auto}"])
def test_config_selects_automatic_layout(tmp_path, text):
    path = tmp_path / "config.yaml"
    path.write_text(text)
    config = load_config(path)
    assert config == load_config(None, ["parallel=auto"])
    assert config.training.layout == "auto"
    result = plan_run(config)
    assert result.best.config.resolve(1).data_parallel == 1


def test_config_combines_automatic_layout_and_fixed_fields(monkeypatch):
    for name, value in FOUR_RANKS.items():
        monkeypatch.setenv(name, value)
    config = load_config(None, ["parallel=auto", "parallel.optimizer_shard=2"])
    best = plan_run(config).best.config
    assert best.optimizer_shard == 2 and best.data_parallel > 1
    assert "HOROVOD_RANK" in os.environ
