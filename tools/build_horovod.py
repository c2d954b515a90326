"""Install Horovod for the TensorFlow of this environment, from its sources.

Horovod publishes no wheels, and its sources do not compile against TensorFlow
2.20 and later: one file, `xla_mpi_ops.cc` (XLA on GPUs, optional), includes
headers that TensorFlow's wheel does not ship. This script downloads the
sources, checks their SHA-256, leaves that file out, builds a wheel and keeps
it in a cache, so that the next environment is set up in seconds.

    python tools/build_horovod.py            install (building where needed)
    python tools/build_horovod.py --wheel    only print the wheel's path

Environment:
    HOROVOD_GPU_OPERATIONS=NCCL   build for GPUs (needs CUDA and NCCL)
    DTRANSFORMER_CACHE            the cache (default: ~/.cache/dtransformer)

Exit codes: 0 installed, 3 no C++ compiler, 1 anything else.
"""

import argparse
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile

VERSION = "0.28.1"
SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
CONSTRAINTS = pathlib.Path(__file__).resolve().parent.parent / "constraints.txt"
LEFT_OUT = "xla_mpi_ops.cc"
OPTIONS = {
    "HOROVOD_WITH_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_PYTORCH": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "HOROVOD_WITHOUT_MPI": "1",
    "HOROVOD_WITH_GLOO": "1",
}


def cache_folder():
    """Return the folder of wheels built for this Python, TensorFlow and options."""
    root = os.environ.get("DTRANSFORMER_CACHE") or pathlib.Path.home() / ".cache/dtransformer"
    gpu = os.environ.get("HOROVOD_GPU_OPERATIONS", "cpu").lower()
    key = "-".join(
        [
            f"horovod{VERSION}",
            f"tf{importlib.metadata.version('tensorflow')}",
            f"{sys.implementation.cache_tag}",
            sysconfig.get_platform(),
            "".join(platform.libc_ver()) or "libc",
            gpu,
        ]
    )
    return pathlib.Path(root) / "wheels" / key


def run(command, log, **kwargs):
    """Run a command with its output in the file `log`; show its end on failure."""
    with open(log, "ab") as output:
        code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, **kwargs).returncode
    if code:
        tail = pathlib.Path(log).read_text(errors="replace").splitlines()[-30:]
        sys.exit(
            "\n".join(tail)
            + f"\nbuild_horovod: '{' '.join(map(str, command))}' failed (exit code {code})"
        )


def download(folder, log):
    """Download the sources into `folder` and check them; return their path."""
    pip = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--no-build-isolation",
        "--no-binary",
        ":all:",
    ]
    run([*pip, "--dest", folder, f"horovod=={VERSION}"], log)
    archive = next(pathlib.Path(folder).glob("horovod-*.tar.gz"))
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    if digest != SHA256:
        sys.exit(
            f"build_horovod: {archive.name} has SHA-256 {digest}, expected {SHA256}; not building it"
        )
    return archive


def unpack(archive, folder):
    """Unpack the sources and leave out the one file that does not compile."""
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    source = pathlib.Path(folder) / f"horovod-{VERSION}"
    listing = source / "horovod/tensorflow/CMakeLists.txt"
    lines = listing.read_text().splitlines(keepends=True)
    kept = [line for line in lines if LEFT_OUT not in line]
    if len(lines) - len(kept) != 1:
        sys.exit(
            f"build_horovod: expected one line naming {LEFT_OUT} in {listing.name}, found {len(lines) - len(kept)}"
        )
    listing.write_text("".join(kept))
    return source


def build(target):
    """Build the wheel and move it to the folder `target`; return its path."""
    if not (shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")):
        print(
            "build_horovod: no C++ compiler found (g++, or what CXX names). Training on one process works",
            file=sys.stderr,
        )
        print(
            "without it; for several ranks install one (Debian: apt-get install g++) and run this again.",
            file=sys.stderr,
        )
        sys.exit(3)
    print(
        f"Building Horovod {VERSION} for TensorFlow {importlib.metadata.version('tensorflow')} (some minutes, once) ...",
        flush=True,
    )
    target.mkdir(parents=True, exist_ok=True)
    log = target / "build.log"
    log.unlink(missing_ok=True)
    tools = ["cmake", "setuptools", "wheel", "packaging"]
    run([sys.executable, "-m", "pip", "install", "--quiet", "-c", CONSTRAINTS, *tools], log)
    scripts = sysconfig.get_path("scripts")  # cmake of this environment comes first
    environment = {**os.environ, **OPTIONS, "PATH": scripts + os.pathsep + os.environ["PATH"]}
    with tempfile.TemporaryDirectory() as folder:
        source = unpack(download(folder, log), folder)
        wheel_command = [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--no-deps",
            "--no-build-isolation",
            "--wheel-dir",
            "dist",
            ".",
        ]
        run(wheel_command, log, cwd=source, env=environment)
        built = next((source / "dist").glob("horovod-*.whl"))
        partial = target / (built.name + ".partial")
        shutil.copy(built, partial)
        return partial.rename(target / built.name)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--wheel", action="store_true", help="print the wheel's path, install nothing"
    )
    arguments = parser.parse_args()
    folder = cache_folder()
    wheel = next(folder.glob("horovod-*.whl"), None) or build(folder)
    if arguments.wheel:
        print(wheel)
        return
    install = [sys.executable, "-m", "pip", "install", "--quiet", "-c", CONSTRAINTS, wheel]
    subprocess.run(install, check=True)
    print(f"Horovod {VERSION} is installed.")


if __name__ == "__main__":
    main()
