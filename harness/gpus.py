"""Fake GPU machines: the driver's files, nvidia-smi and libcuda."""

import pathlib
import types

_VERSION = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Release Build\n"


def write_driver(folder, version="580.159.04", model=None):
    """Write the driver's files into a folder, optionally with a GPU of the given model."""
    (folder / "version").write_text(_VERSION.format(version))
    if model is not None:
        (folder / "gpus/0000:01:00.0").mkdir(parents=True)
        (folder / "gpus/0000:01:00.0/information").write_text(f"Model: \t\t {model}\nIRQ: 1\n")


def write_nvidia_smi(folder, **fields):
    """Write a fake nvidia-smi into a folder. It prints the given fields for two identical GPUs."""
    cases = " ".join(
        f'--query-gpu={name}) echo "{text}"; echo "{text}";;' for name, text in fields.items()
    )
    path = pathlib.Path(folder, "nvidia-smi")
    path.write_text(f'#!/bin/sh\ncase "$1" in {cases} *) exit 9;; esac\n')
    path.chmod(0o755)


def put(code, value):
    """Return a fake C function that writes `value` to its pointer argument and returns `code`."""

    def function(pointer, *_):
        pointer._obj.value = value
        return code

    return function


def write_bus_id(text, length, gpu):
    """Write a GPU's PCI address in capitals, like libcuda."""
    text.value = f"0000:{0x3A + gpu:02X}:00.0".encode()
    return 0


def write_bus(folder, cores):
    """Write a fake /sys/bus/pci/devices with one text of nearby cores per GPU."""
    for gpu, nearby_cores in enumerate(cores):
        path = pathlib.Path(folder, f"0000:{0x3A + gpu:02x}:00.0")
        path.mkdir()
        (path / "local_cpulist").write_text(nearby_cores + "\n")


def libcuda(version=12080, code=0, memory=48 << 30, names=()):
    """Return a fake libcuda. `names` are the models of the visible GPUs."""

    def write_name(text, length, gpu):
        text.value = names[gpu].encode()

    return types.SimpleNamespace(
        cuDeviceGetCount=put(code, len(names)),
        cuDeviceGetName=write_name,
        cuInit=lambda flags: code,
        cuDriverGetVersion=put(0, version),
        cuDeviceTotalMem_v2=put(0, memory),
        cuDeviceGetPCIBusId=write_bus_id,
    )
