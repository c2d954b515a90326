"""Every part of benchmarks/gpu.py also runs on CPUs with tiny sizes."""

import json
import pathlib
import sys

import pytest

from benchmarks.gpu_parts import PARTS
from harness.launch import launch, tail

ROOT = pathlib.Path(__file__).parents[1]
# Part -> key in one of its results.
QUICK = {"card": "first", "nccl": "wrong"}
LONG = {
    "uses": "cpu_reads_and_generates_the_same",
    "peaks": "tflops",
    "numbers": "two_runs",
    "cudnn": "taken",
    "cudnn_time": "blockwise",
    "mesh": "losses_apart",
    "ranks": "losses_apart",
    "speed": "tokens_per_second",
    "profile": "seconds",
    "largest": "rows",
    "sums": "all_reduce",
    "layouts": "losses_apart",
    "stress": "steps",
}


def check(parts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # keep log files out of the repository
    arguments = [ROOT / "benchmarks/gpu.py", "--smoke", "--jobs", "2", "--parts", ",".join(parts)]
    arguments += ["--variants", "355m/clusters/blockwise"]
    process = launch(1, arguments, timeout=1500)
    results = [json.loads(line) for line in process.stdout.splitlines() if line.startswith("{")]
    output = tail(process.stdout, process.stderr)
    for part, word in parts.items():
        part_results = [result for result in results if result["part"].split(":")[0] == part]
        assert any(word in result for result in part_results), (part, output)
        assert not any({"failed", "error", "errors"} & result.keys() for result in part_results), (
            output
        )
    return results


def test_every_part_can_be_imported_and_is_tested(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])  # parts extend the path
    assert all(callable(part.function()) for part in PARTS.values())
    assert {*QUICK, *LONG} | {"numbers_tf32", "peer"} == PARTS.keys()


def test_quick_parts_run_on_cpus(tmp_path, monkeypatch):
    results = check(QUICK, tmp_path, monkeypatch)
    assert not any(result.get("wrong") for result in results)


@pytest.mark.long
def test_long_parts_run_on_cpus(tmp_path, monkeypatch):
    results = check(LONG, tmp_path, monkeypatch)
    assert {"part": "uses", "cpu_reads_and_generates_the_same": True, "said": ""} in results
    assert all(r["losses_apart"] < 1e-5 for r in results if "losses_apart" in r)
