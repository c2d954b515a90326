"""The logged fraction of the machine's peak performance is at most 1."""

import pytest

from dtransformer.reports.throughput import PRODUCTS, measured_peak
from dtransformer.trainers.step_logs import Throughput


def test_share_of_peak_is_flops_per_second_divided_by_the_peak():
    throughput = Throughput(peak=100.0)
    throughput.add(seconds=2.0, tokens=10, flops=50.0)
    logs = throughput.logs()
    assert logs["tokens_per_second"] == 5 and logs["share_of_peak"] == pytest.approx(0.25)


def test_faster_steps_raise_the_measured_peak():
    throughput = Throughput(peak=100.0)
    throughput.add(seconds=1.0, tokens=10, flops=200.0)
    assert throughput.logs()["share_of_peak"] == 1
    throughput.reset()
    throughput.add(seconds=1.0, tokens=10, flops=50.0)
    assert throughput.logs()["share_of_peak"] == pytest.approx(0.25)


def test_peak_measurement_is_not_limited_by_launch_overhead(monkeypatch):
    size, count = PRODUCTS["GPU"]
    # A launch takes 50 µs. The products take 100 times longer, even on a GPU with 1e15 FLOP per second.
    assert 2 * size**3 * count / 1e15 > 100 * 50e-6
    monkeypatch.setitem(PRODUCTS, "CPU", (64, 8))  # One call multiplies repeatedly, as on a GPU.
    assert 1e6 < measured_peak.__wrapped__("float32", seconds=0.01) < 1e13
