"""`doctor` explains why a GPU is not used or not fully used, and how to fix it."""

import types

import pytest
import tensorflow as tf

from dtransformer import nvidia_driver
from dtransformer.cli import doctor as doctor_module
from dtransformer.cli import doctor_gpu, main, measured_machine, warm
from dtransformer.errors import InputError
from dtransformer.planner.machine import this_device
from harness.gpus import libcuda, put, write_driver, write_nvidia_smi


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Function that simulates a machine with a driver, libraries and GPUs."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(nvidia_driver, "_FILES", tmp_path)

    def has(gpus=(), cuda=None, nccl=(0, 22707), libraries=True):
        library = None if cuda is None else libcuda(*cuda)
        monkeypatch.setattr(
            nvidia_driver, "_cuda", lambda: (library, library and library.cuInit(0))
        )
        monkeypatch.setattr(doctor_gpu, "_can_be_opened", lambda name: libraries)
        framework = types.SimpleNamespace(ncclGetVersion=put(*nccl))
        monkeypatch.setattr(doctor_gpu, "_framework", lambda: framework)
        monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind=None: list(gpus))
        experimental, grown = tf.config.experimental, []
        monkeypatch.setattr(experimental, "get_device_details", lambda gpu: gpu)
        monkeypatch.setattr(experimental, "set_memory_growth", lambda gpu, on: grown.append(gpu))
        return grown

    return has


def card(name, *capability):
    return {"device_name": name, "compute_capability": capability}


H100, T4 = card("NVIDIA H100", 9, 0), card("Tesla T4", 7, 5)


@pytest.mark.parametrize(
    "gpus, cuda, ok, message",
    [
        (
            [H100] * 8,
            (12050,),
            True,
            "8 × NVIDIA H100, compute capability 9.0: its driver compiles",
        ),
        ([H100], (12040,), False, "its driver supports CUDA 12.4, but TensorFlow's"),
        ([T4], (12020,), True, "1 × Tesla T4, compute capability 7.5"),
        ([T4], (11080,), False, "its driver supports CUDA 11.8"),
        ([card("B200", 10, 0)], (12080,), True, "older than this card and untested on it"),
        ([card("Quadro M4000", 5, 2)], (12080,), False, "TensorFlow's wheel requires at least 6.0"),
    ],
)
def test_doctor_checks_visible_gpus(machine, gpus, cuda, ok, message):
    grown = machine(gpus, cuda)
    result, nccl = doctor_gpu.examine_gpus()
    assert result["ok"] is ok and message in result["found"] and bool(result["fix"]) is not ok
    assert nccl["found"] == "2.27.7" and grown == gpus  # Other programs keep their memory.


def test_doctor_reports_missing_nccl(machine):
    machine([T4], (12080,), nccl=(2, 0))
    assert doctor_gpu.examine_gpus()[1]["ok"] is None  # One GPU does not need NCCL.
    machine([T4, T4], (12080,), nccl=(2, 0))
    result = doctor_gpu.examine_gpus()[1]
    assert result["ok"] is False and "tensorflow[and-cuda]" in result["fix"]


@pytest.mark.parametrize(
    "cuda, libraries, message, fix",
    [
        ((12080,), False, "libcublas.so.12 and 6 others cannot be opened", "make setup GPU=1"),
        ((11040,), False, "its driver supports CUDA 11.4", "version 555"),
        ((12020,), True, "its driver supports CUDA 12.2", "version 555"),
        (None, True, "libcuda.so.1 cannot be opened", "--gpus all"),
        ((12080, 803), True, "CUDA does not start (error 803", "nvidia-smi"),
        ((12080,), True, "all CUDA libraries were found", "TF_CPP_MIN_LOG_LEVEL=0"),
    ],
)
def test_doctor_explains_why_tensorflow_finds_no_gpu(
    machine, tmp_path, cuda, libraries, message, fix
):
    write_driver(tmp_path)
    machine((), cuda, libraries=libraries)
    (result,) = doctor_gpu.examine_gpus()
    assert result["ok"] is False and fix in result["fix"]
    assert result["found"].startswith("driver 580.159.04, but TensorFlow finds no GPU: ")
    assert message in result["found"] and "\n" not in result["found"]


def test_doctor_fails_if_a_driver_has_no_visible_gpu(monkeypatch, tmp_path, capsys):
    write_driver(tmp_path)
    monkeypatch.setattr(nvidia_driver, "_FILES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(doctor_module, "_horovod", list)  # It would start a process.
    assert doctor_module.doctor() == 1
    (line,) = [x for x in capsys.readouterr().out.splitlines() if " GPU " in x and "FAILED" in x]
    assert "driver 580.159.04, but TensorFlow finds no GPU: libcublas.so.12 and 6 others" in line


def test_doctor_finds_the_driver_through_nvidia_smi(machine, tmp_path):
    write_nvidia_smi(tmp_path, driver_version="560.94", name="NVIDIA L4")
    machine((), (12060,), libraries=False)  # The same as on WSL.
    assert doctor_gpu.examine_gpus()[0]["found"].startswith("driver 560.94, but")


def test_doctor_accepts_no_driver_and_hidden_gpus(machine, tmp_path, monkeypatch):
    machine()
    assert doctor_gpu.examine_gpus()[0]["ok"] is None
    write_driver(tmp_path, model="NVIDIA L40S")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert doctor_gpu.examine_gpus()[0]["ok"] is None and this_device().name == "cpu"


def test_this_device_is_the_first_visible_gpu(machine, tmp_path, monkeypatch):
    machine((), None)
    write_nvidia_smi(tmp_path, name="NVIDIA H200")
    assert this_device().name == "h200-141"
    write_driver(tmp_path, model="NVIDIA A100-SXM4-40GB")
    assert this_device().name == "a100-40"
    machine((), (12080, 0, 80 << 30, ("NVIDIA H100 80GB HBM3", "NVIDIA T400 4GB")))
    assert this_device().name == "h100-80"  # CUDA's order, not the bus order.
    machine((), (12080, 0, 10 << 30, ("NVIDIA H100 80GB HBM3 MIG 1g.10gb",)))
    with pytest.raises(InputError, match="MIG 1g.10gb.*--measure"):
        this_device()


def test_measures_gpus_that_no_table_lists(machine, tmp_path, monkeypatch):
    write_driver(tmp_path, model="NVIDIA L40S")
    machine([card("NVIDIA L40S", 8, 9)], (12080,))
    with pytest.raises(InputError, match="NVIDIA L40S.*--measure"):
        this_device()
    assert measured_machine.own_memory_gb() == pytest.approx(51.5, abs=0.1)


def test_gpu_measurements_exceed_launches_and_caches():
    sizes = measured_machine._SIZES["GPU"]
    assert 4 * sizes.memory_items >= 2**30
    smallest = min(sizes.few * sizes.features[0] ** 2, sizes.rows * sizes.few**2)
    assert 32 * 2 * smallest / 1e15 > 10 * 10e-6  # seconds of 32 products; of a launch


def test_warm_fails_without_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr(warm, "device_type", lambda: "CPU")
    assert main(["doctor", "--warm"]) == 1
    assert "TensorFlow finds no GPU whose driver could compile kernels" in capsys.readouterr().out


@pytest.mark.long
def test_warm_trains_and_generates_in_each_type(tmp_path, monkeypatch):
    monkeypatch.setattr(warm, "device_type", lambda: "GPU")
    monkeypatch.setenv("CUDA_CACHE_PATH", str(tmp_path))
    (tmp_path / "index").write_bytes(b"0" * 2_000_000)
    *types, cache = warm.warm()
    assert all(item["ok"] for item in types), types
    assert [item["found"].split(":")[0] for item in types] == list(warm._POLICIES)
    assert "has 2 MB, 2 before" in cache["found"]
