"""`doctor --hosts` reports whether each host can join a job, and how to fix problems."""

import pytest

from dtransformer.cli import doctor_hosts, host_probe, main
from harness.gpus import write_nvidia_smi


def test_reports_local_host(capsys):
    assert main(["doctor", "--hosts", "localhost"]) == 0
    message = capsys.readouterr().out
    for what in ("ssh", "versions", "files", "GPUs", "memory", "clock", "network"):
        assert f"localhost: {what}" in message
    assert "ms round trip" in message and "FAILED" not in message


def test_reports_host_without_ssh(capsys):
    assert main(["doctor", "--hosts", "no-such-host.invalid"]) == 1
    message = capsys.readouterr().out
    assert (
        "FAILED   no-such-host.invalid: ssh" in message
        and "-> set up ssh without a password" in message
    )


@pytest.mark.parametrize("field, value, message", [
    ("versions", {**host_probe.describe()["versions"], "numpy": "0.1"}, "numpy 0.1"),
    ("files", "another", "dtransformer's files differ"),
    ("gpus", "8 × NVIDIA H100, 550.54", "8 × NVIDIA H100"),
    ("free_gib", 0.2, "0.2 GiB free"),
    ("time", 0.0, " s, measured through ssh"),
])  # fmt: skip
def test_reports_differences_between_hosts(field, value, message):
    local_host = host_probe.describe()
    result = doctor_hosts._compare(
        "b", {**local_host, field: value}, local_host, local_host["time"]
    )
    (wrong,) = [check for check in result if not check["ok"]]
    assert message in wrong["found"] and wrong["fix"]


def test_probe_lists_gpus_by_model_and_driver(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert host_probe.gpus() == "none"
    write_nvidia_smi(tmp_path, **{"name,driver_version": "NVIDIA L4, 560.94"})
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    assert host_probe.gpus() == "2 × NVIDIA L4, 560.94"
