"""OneDNN is on for every x86 processor, unless the environment decides otherwise."""

import os
import subprocess
import sys

import pytest

from dtransformer import onednn

# Recorded "flags" lines of /proc/cpuinfo, without features that do not matter here.
CASCADE_LAKE = (
    "fma movbe popcnt avx f16c bmi1 avx2 bmi2 avx512f avx512dq avx512bw avx512vl avx512_vnni"
)
SKYLAKE_X = "fma movbe popcnt avx f16c bmi1 avx2 bmi2 avx512f avx512dq avx512cd avx512bw avx512vl"
ZEN_3 = "fma movbe popcnt avx f16c bmi1 avx2 bmi2 sha_ni clzero vaes vpclmulqdq"
HASWELL = "fma movbe popcnt avx f16c bmi1 avx2 bmi2 erms invpcid"
ALDER_LAKE = "fma movbe popcnt avx f16c bmi1 avx2 bmi2 sha_ni avx_vnni gfni vaes"
SAPPHIRE_RAPIDS = f"{CASCADE_LAKE} avx_vnni avx512_bf16 amx_bf16 amx_tile amx_int8"
SANDY_BRIDGE = "popcnt aes xsave avx"


def cpuinfo(flags):
    """Return the text of /proc/cpuinfo of two cores."""
    core = f"processor\t: 0\nmodel\t\t: 85\nflags\t\t: fpu sse4_2 {flags} ospke\nbugs\t\t: \n"
    return f"{core}\n{core}"


@pytest.mark.parametrize("flags, is_off", [
    (ZEN_3, True), (HASWELL, True), (SKYLAKE_X, True),
    (CASCADE_LAKE, False), (ALDER_LAKE, False), (SAPPHIRE_RAPIDS, False), (SANDY_BRIDGE, False),
])  # fmt: skip
def test_tensorflow_turns_onednn_off_without_neural_network_features(flags, is_off):
    assert onednn.is_off_by_default(cpuinfo(flags).splitlines(keepends=True)) is is_off


def test_arm_processors_keep_the_default():
    lines = ["processor\t: 0\n", "Features\t: fp asimd evtstrm bf16 i8mm\n", "CPU part\t: 0xd40\n"]
    assert not onednn.is_off_by_default(lines)


# Program that replaces /proc/cpuinfo and prints the environment variable.
PATCHED = """
import builtins, io, os, sys
real = builtins.open
def patched(name, *args, **options):
    return io.StringIO({text!r}) if name == "/proc/cpuinfo" else real(name, *args, **options)
builtins.open = patched
{imported}
import dtransformer
print(os.environ.get("TF_ENABLE_ONEDNN_OPTS"))
"""
TENSORFLOW_IMPORTED = "sys.modules['tensorflow'] = None"


def run(flags, imported="", **environment):
    """Import the package on a simulated processor and return the variable and stderr."""
    inherited = {key: value for key, value in os.environ.items() if key != "TF_ENABLE_ONEDNN_OPTS"}
    process = subprocess.run(
        [sys.executable, "-c", PATCHED.format(text=cpuinfo(flags), imported=imported)],
        capture_output=True,
        text=True,
        check=True,
        env={**inherited, **environment},
    )
    return process.stdout.strip(), process.stderr


def test_importing_the_package_turns_onednn_on():
    assert run(ZEN_3) == ("1", "")
    assert run(CASCADE_LAKE) == ("None", "")


def test_environment_variable_takes_precedence():
    assert run(ZEN_3, TENSORFLOW_IMPORTED, TF_ENABLE_ONEDNN_OPTS="0") == ("0", "")


def test_warns_if_tensorflow_was_imported_before():
    _, errors = run(ZEN_3, TENSORFLOW_IMPORTED)
    assert errors.count("UserWarning") == 1
    assert "Import dtransformer first or set TF_ENABLE_ONEDNN_OPTS=1" in errors
    assert run(ZEN_3, TENSORFLOW_IMPORTED, HOROVOD_LOCAL_RANK="1")[1] == ""
    assert run(CASCADE_LAKE, TENSORFLOW_IMPORTED)[1] == ""
