"""`dtransformer doctor --install-horovod`: compile Horovod for this environment's TensorFlow.

Horovod publishes no wheels, and its sources do not compile with TensorFlow 2.20 and later. The file
`xla_mpi_ops.cc` (optional, for XLA on GPUs) needs headers and a function that TensorFlow's wheel does
not contain. Therefore the sources are downloaded, compared with their SHA-256, edited and compiled.
The wheel is stored in a cache, so the next installation takes seconds. The build tools go to a
temporary folder. The environment only receives Horovod and its dependencies.

The same wheel serves CPUs and GPUs. It is compiled without CUDA and NCCL, because TensorFlow's wheel
contains the CUDA headers, and its library forwards calls to the CUDA and NCCL libraries that it opens
on the first call. Each process therefore has a single CUDA and a single NCCL.

Environment variables:
    DTRANSFORMER_CACHE: Folder of the cache. Defaults to `~/.cache/dtransformer`.
    CXX: C++ compiler. Defaults to `g++` or `c++`.
    PIP_...: Settings of pip.
"""

import hashlib
import importlib.metadata
import importlib.util
import os
import pathlib
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile

from dtransformer.errors import InputError, to_one_line

COMMAND = "dtransformer doctor --install-horovod"
VERSION = "0.28.1"
SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"

_SOURCES = pathlib.Path(__file__).parent / "horovod_sources"
# Edits of Horovod's TensorFlow operations: (file, text of the replaced line, file with the new text).
# The first edit adds GPU operations that use NCCL, and removes the file that does not compile. The
# second one corrects the path of a header. The last two allocate the output of a gather when the
# operation starts. Otherwise gathering the next block's weights would wait for the current block.
_EDITS = [
    ("CMakeLists.txt", "xla_mpi_ops.cc", "on_gpus.cmake"),
    ("mpi_ops.cc", '#include "tensorflow/compiler/xla/stream_executor/stream.h"', "stream.inc"),
    ("mpi_ops.cc", "= context_->allocate_output(output_index,", "take_expected.inc"),
    ("mpi_ops.cc", "= EnqueueTensorAllgather(", "expect_rows.inc"),
]
# The versions that the wheel was built and tested with.
_BUILD_TOOLS = ("cmake==3.31.6", "setuptools==80.10.2", "wheel==0.48.0", "packaging==26.3")
_OPTIONS = {
    "HOROVOD_WITH_TENSORFLOW": "1",
    "HOROVOD_WITHOUT_PYTORCH": "1",
    "HOROVOD_WITHOUT_MXNET": "1",
    "HOROVOD_WITHOUT_MPI": "1",
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITHOUT_NVTX": "1",
}
_NO_OUTPUT = "the command printed nothing"
_BUILT_WITH = (
    "import horovod.tensorflow as h; "
    "print('gloo' if h.gloo_built() else '', 'mpi' if h.mpi_built() else '', "
    "'nccl' if h.nccl_built() else '')"
)


def install_horovod():
    """Install Horovod in this environment, from the cached wheel or from its sources.

    Raises:
        InputError: If pip or a compiler is missing, the sources cannot be downloaded, differ from the
            tested sources or do not compile, or the wheel cannot be imported.
    """
    if importlib.util.find_spec("pip") is None:
        raise InputError(
            f"{sys.prefix} has no pip to install Horovod with. Run '{sys.executable} -m ensurepip', "
            f"then '{COMMAND}' again."
        )
    folder = cache_folder()
    log = folder / "build.log"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        wheel = next(folder.glob("horovod-*.whl"), None) or _build(folder, log)
        pip = [sys.executable, "-m", "pip", "install", "--quiet"]
        problem = f"Cannot install {wheel.name}. If it is damaged, remove it from {folder}."
        # pip cannot know that an installed Horovod was compiled for another TensorFlow.
        run([*pip, "--force-reinstall", "--no-deps", wheel], log, problem)
        run([*pip, wheel], log, problem)
    except OSError as error:
        raise InputError(
            f"Cannot build Horovod in {folder} ({error}). Set DTRANSFORMER_CACHE to a writable "
            "folder."
        ) from error
    works, state = built_with()
    if not works:
        raise InputError(f"Horovod {VERSION} was installed, but cannot be imported: {state}")
    print(f"Horovod {VERSION} is installed, built with {state} ({wheel})")


def built_with(environment=None):
    """Import Horovod in a new process, because a broken build may crash the process.

    Args:
        environment: Dict of additional environment variables for the process.

    Returns:
        A `(works, text)` tuple. `works` is true if Horovod can be imported. The text then lists its
        features (`gloo`, `mpi`, `nccl`). Otherwise it is the last line of the error.
    """
    command = [sys.executable, "-c", _BUILT_WITH]
    variables = {**os.environ, **(environment or {})}
    result = subprocess.run(command, capture_output=True, text=True, env=variables)
    if result.returncode:
        return False, (result.stderr.strip().splitlines() or [_NO_OUTPUT])[-1]
    return True, " ".join(result.stdout.split())


def compiler():
    """Return the path of the C++ compiler, `CXX` or else g++ or c++, or `None` if it is missing."""
    named = shlex.split(os.environ.get("CXX", ""))[:1]
    return next(filter(None, map(shutil.which, named or ("g++", "c++"))), None)


def horovodrun():
    """Return the path of horovodrun in this environment or in `PATH`, or `None` if it is missing."""
    local = shutil.which("horovodrun", path=os.path.dirname(sys.executable))
    return local or shutil.which("horovodrun")


def cache_folder():
    """Return the folder of the wheel for this Python, TensorFlow, platform and build options."""
    root = os.environ.get("DTRANSFORMER_CACHE") or pathlib.Path.home() / ".cache/dtransformer"
    key = (
        f"horovod{VERSION}",
        f"tf{importlib.metadata.version('tensorflow')}",
        sys.implementation.cache_tag,
        sysconfig.get_platform(),
        "".join(platform.libc_ver()) or "libc",
        _digest_of_edits(),
    )
    return pathlib.Path(root).absolute() / "wheels" / "-".join(key)


def _digest_of_edits():
    sources = [file.read_text("utf-8") for file in sorted(_SOURCES.glob("*.*"))]
    text = repr([sources, _EDITS, _OPTIONS, _BUILD_TOOLS, _has_cuda_headers()])
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _has_cuda_headers():
    """Return whether TensorFlow's wheel contains CUDA headers. Some platforms have CPU wheels."""
    folder = pathlib.Path(importlib.util.find_spec("tensorflow").origin).parent
    headers = "include/third_party/gpus/cuda/include/cuda_runtime.h"
    return (folder / headers).exists()


def _build(folder, log):
    """Build and try the wheel, move it to `folder` and return its path.

    Raises:
        InputError: If there is no C++ compiler, or if the build or the trial fails.
    """
    if compiler() is None:
        raise InputError(
            f"No C++ compiler found ({os.environ.get('CXX') or 'g++ or c++'}). Install one (Debian: "
            f"apt-get install g++ make) and run '{COMMAND}' again. A single process does not need "
            "Horovod."
        )
    tensorflow = importlib.metadata.version("tensorflow")
    print(f"Building Horovod {VERSION} for TensorFlow {tensorflow}. This takes minutes, only once.")
    sys.stdout.flush()
    log.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        temporary = pathlib.Path(temporary)
        environment = _build_environment(temporary / "tools", log)
        archive = download(temporary, log, environment)
        source = unpack(archive, temporary)
        pip = [sys.executable, "-m", "pip", "wheel", "--no-cache-dir", "--no-deps"]
        command = [*pip, "--no-build-isolation", "--wheel-dir", temporary / "dist", source]
        run(command, log, "Horovod does not compile.", environment)
        built = next((temporary / "dist").glob("horovod-*.whl"))
        _try(built, temporary / "tried", log)
        partial = folder / f"{built.name}.{os.getpid()}.partial"
        shutil.copy(built, partial)
        return partial.rename(folder / built.name)


def _try(wheel, folder, log):
    """Install a wheel to a temporary folder and import it, so that a broken one is never installed."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", folder, wheel]
    run(pip, log, f"Cannot install {wheel.name}.")
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    works, state = built_with({"PYTHONPATH": path})
    if not works:
        raise InputError(f"Horovod {VERSION} was compiled, but cannot be imported: {state}")


def _build_environment(tools, log):
    """Install the build tools in the folder `tools` and return the environment for the compiler."""
    # The versions of the tools are fixed, so PIP_CONSTRAINT must not apply to them. Its path may also
    # be relative, and setuptools runs pip in the folder of the sources.
    variables = {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"}
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", tools]
    run([*pip, *_BUILD_TOOLS], log, f"Cannot download {', '.join(_BUILD_TOOLS)}.", variables)
    return {
        **variables,
        **_OPTIONS,
        "PATH": os.pathsep.join([str(tools / "bin"), os.environ.get("PATH", os.defpath)]),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(tools), os.environ.get("PYTHONPATH")])),
        # MAKEFLAGS of an outer make would limit Horovod's build to one core.
        "MAKEFLAGS": f"-j{len(os.sched_getaffinity(0))}",
    }


def download(folder, log, environment=None):
    """Download the sources to `folder`, check their hash and return the path of the archive.

    pip compares the hash before it runs any downloaded code.
    """
    requirement = folder / "requirement.txt"
    requirement.write_text(f"horovod=={VERSION} --hash=sha256:{SHA256}\n")
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-build-isolation"]
    pip += ["--no-binary", ":all:", "--require-hashes", "--dest", folder, "-r", requirement]
    run(pip, log, f"Cannot download the sources of Horovod {VERSION}.", environment)
    return next(folder.glob("horovod-*.tar.gz"))


def unpack(archive, folder):
    """Unpack the sources to `folder`, apply `_EDITS`, add the GPU sources, and return their path."""
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    source = folder / f"horovod-{VERSION}"
    for name, words, replacement in _EDITS:
        is_left_out = replacement == "on_gpus.cmake" and not _has_cuda_headers()
        text = "" if is_left_out else (_SOURCES / replacement).read_text("utf-8")
        _replace(source / "horovod/tensorflow" / name, words, text)
    for file in (*_SOURCES.glob("*.cc"), *_SOURCES.glob("*.h")):
        shutil.copy(file, source / "horovod/common/ops/cuda")
    return source


def _replace(path, words, text):
    """Replace the single line of a file that contains `words` with a text."""
    lines = path.read_text().splitlines(keepends=True)
    matches = [index for index, line in enumerate(lines) if words in line]
    if len(matches) != 1:
        raise InputError(
            f"Expected one line with {words} in Horovod's {path.name}, found {len(matches)}."
        )
    lines[matches[0]] = text
    path.write_text("".join(lines))


def run(command, log, problem, environment=None):
    """Run a command and append its output to the file `log`.

    Args:
        command: List of program and arguments.
        log: Path of a text file.
        problem: Beginning of the error message.
        environment: Dict of all environment variables. `None` inherits this process' variables.

    Raises:
        InputError: If the command fails. The message includes the most relevant line of its output.
    """
    command = [str(word) for word in command]
    with open(log, "a+", encoding="utf-8", errors="replace") as output:
        output.write(f"$ {shlex.join(command)}\n")
        output.flush()
        begin = output.tell()
        result = subprocess.run(command, stdout=output, stderr=output, env=environment)
        if result.returncode == 0:
            return
        output.seek(begin)
        text = output.read()
    raise InputError(f"{problem} The cause: {to_one_line(_reason(text), 100)}. See the log {log}.")


def _reason(text):
    """Return the line of a failed command's output that most likely names the cause."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for sign in (" error: ", "CMake Error", "Connection", "ERROR: "):
        for index, line in enumerate(lines):
            if sign in line:
                # CMake prints the position and then, on the next line, the error.
                return " ".join(lines[index : index + 1 + line.endswith(":")])
    return lines[-1] if lines else _NO_OUTPUT
