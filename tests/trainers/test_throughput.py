"""Promise: what logs tell of speed is a share of what the machine can do, never more than all of it."""

import pytest

from dtransformer.reports.throughput import PRODUCTS, Throughput, measured_peak


def test_share_of_peak_is_flops_per_second_divided_by_the_peak():
    found = Throughput()
    found.start(peak=100.0)
    found.add(seconds=2.0, tokens=10, flops=50.0)
    logs = found.logs()
    assert logs["tokens_per_second"] == 5 and logs["share_of_peak"] == pytest.approx(0.25)


def test_faster_steps_raise_the_measured_peak():
    found = Throughput()
    found.start(peak=100.0)
    found.add(seconds=1.0, tokens=10, flops=200.0)
    assert found.logs()["share_of_peak"] == 1
    found.reset()
    found.add(seconds=1.0, tokens=10, flops=50.0)
    assert found.logs()["share_of_peak"] == pytest.approx(0.25)


def test_peak_measurement_is_not_limited_by_launch_overhead(monkeypatch):
    size, times = PRODUCTS["GPU"]
    assert 2 * size**3 * times / 1e15 > 100 * 50e-6  # seconds of a fast card; of launch and read
    monkeypatch.setitem(PRODUCTS, "CPU", (64, 8))  # several in one call, as on a GPU
    assert 1e6 < measured_peak.__wrapped__("float32", seconds=0.01) < 1e13
