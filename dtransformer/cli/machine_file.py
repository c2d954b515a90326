"""`dtransformer plan --measure`: this machine, measured, as a file that --device takes."""

import dataclasses
import os

import yaml

from dtransformer.cli.measured_machine import measure_device
from dtransformer.datasets.text_files import write_text_atomically
from dtransformer.parallel import job
from dtransformer.planner.clusters import Device
from dtransformer.planner.machine import this_device


def measure_to(path: str | os.PathLike) -> None:
    """Measure the ranks of this job, all of them busy at once; rank 0 writes the file, and tells.

    Args:
        path: a YAML file.
    """
    device = measure_device("measured", round(this_device().memory_gb, 3))
    if job.is_chief():
        write_text_atomically(path, text_of(device))
        print(f"{path}: a device of {job.size()} rank{'s' * (job.size() > 1)}:\n{text_of(device)}")
    job.shutdown()


def text_of(device: Device) -> str:
    """Return a device as YAML.

    Example:

    >>> from dtransformer.planner.clusters import device_named
    >>> text_of(device_named("a100")).splitlines()[:2]
    ['name: a100-80', 'tflops_16_bit: 312']
    """
    fields = dataclasses.asdict(device)
    round_ = lambda value: float(f"{value:.4g}") if isinstance(value, float) else value
    return yaml.safe_dump({name: round_(value) for name, value in fields.items()}, sort_keys=False)
