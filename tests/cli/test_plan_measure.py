"""The planner accepts a measured machine as a device."""

import json

import pytest

from dtransformer.cli import main
from dtransformer.cli.plan import load_device
from harness.launch import launch, tail


def test_plan_measure_writes_a_usable_device(tmp_path, capsys):
    path = str(tmp_path / "machine.yaml")
    assert main(["plan", "--measure", path]) == 0
    device = load_device(path)
    assert 1e-3 < device.tflops_32_bit < 100 and device.memory_gb_per_second > 0.1
    assert device.constants.memory_share > 0 and device.sharing == 1
    assert device.constants.pass_overhead_us > 0 and "measured" in capsys.readouterr().out
    ask = ["plan", "--model", "gpt2-small", "--device", path, "--devices", "1"]
    assert main([*ask, "--global-batch", "4", "--precision", "float32", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    # Six FLOPs per position and weight plus the attention scores, at less than the peak.
    assert result["layouts"][0]["step_seconds"] > 4 * 1024 * 6 * 1e8 / device.tflops_32_bit / 1e12


@pytest.mark.long
def test_plan_measure_measures_links_between_ranks(tmp_path):
    path = str(tmp_path / "machine.yaml")
    done = launch(2, ["-m", "dtransformer.cli", "plan", "--measure", path], timeout=300)
    assert not done.returncode, tail(done.stdout, done.stderr)
    links = load_device(path).links
    assert set(links) == {"data", "model", "stage"}
    for link in links.values():
        assert link.gb_per_second > 0.01 and 1 < link.call_us < 1e6
