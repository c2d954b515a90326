"""The Slurm and Kubernetes examples use valid options, and Slurm jobs are requeued."""

import os
import pathlib
import subprocess

import pytest
import yaml

from dtransformer.cli.launching.hosts import parse_hosts
from dtransformer.cli.options import make_parser

LAUNCH = pathlib.Path(__file__).parents[1] / "examples/launch"


@pytest.mark.parametrize("code, queued_again", [(0, False), (1, False), (75, True)])
def test_slurm_example_launches_and_requeues(code, queued_again, tmp_path):
    scontrol = f'echo "$@" >> {tmp_path}/scontrol; [ "$1" = requeue ] || printf "n1\\nn2\\n"'
    launch = f'echo "$@" > {tmp_path}/arguments; cp "$7" {tmp_path}/hosts; exit {code}'
    for name, text in {"scontrol": scontrol, "dtransformer": launch}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7",
                   "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_GPUS_ON_NODE": "4"}  # fmt: skip
    command = ["bash", str(LAUNCH / "slurm.sbatch"), "python", "train.py", "--set", "x=1"]
    process = subprocess.run(command, env=environment, check=False, timeout=60)
    assert process.returncode == code
    assert ("requeue 7" in (tmp_path / "scontrol").read_text()) is queued_again
    arguments = make_parser().parse_args((tmp_path / "arguments").read_text().split())
    assert arguments.rank_command[-4:] == ["python", "train.py", "--set", "x=1"]
    assert parse_hosts((tmp_path / "hosts").read_text(), "hosts") == {"n1": 4, "n2": 4}


def test_kubernetes_example_has_valid_options():
    job = yaml.safe_load((LAUNCH / "mpijob.yaml").read_text())
    pods = job["spec"]["mpiReplicaSpecs"]
    launcher = pods["Launcher"]["template"]["spec"]
    program, *command = launcher["containers"][0]["command"]
    arguments = make_parser().parse_args(command)
    assert program == "dtransformer" and arguments.discovery_script.startswith("/etc/mpi/")
    assert arguments.rank_command[-2:] == ["python", "train.py"]
    assert launcher["terminationGracePeriodSeconds"] > 120, "the launcher needs time to save"
    gpus = pods["Worker"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert gpus["nvidia.com/gpu"] == job["spec"]["slotsPerWorker"]
