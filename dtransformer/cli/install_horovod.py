"""`dtransformer doctor --install-horovod`: Horovod for the TensorFlow of this environment.

Horovod publishes no wheels, and its sources do not compile against TensorFlow 2.20 and
later: one file, `xla_mpi_ops.cc` (XLA on GPUs, optional), includes headers that
TensorFlow's wheel does not ship, and a function that it does not export. So the sources
are downloaded, compared with their SHA-256, edited, compiled, and the wheel is kept in a
cache: the next environment has it in seconds. What compiling needs is installed in a
temporary folder; the environment gets Horovod and what it imports, nothing else.

There is one wheel for CPUs and GPUs. It is compiled without CUDA and NCCL: TensorFlow's
wheel has CUDA's headers, and its library hands calls of CUDA and NCCL on to theirs, which
it opens when the first one comes. So a process has one CUDA and one NCCL, TensorFlow's.

Environment variables:
    DTRANSFORMER_CACHE: folder of the cache, `~/.cache/dtransformer` by default.
    CXX: the C++ compiler.
    PIP_...: pip's own settings.
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

from dtransformer.errors import InputError, one_line

COMMAND = "dtransformer doctor --install-horovod"
VERSION = "0.28.1"
SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"

_OWN_SOURCES = pathlib.Path(__file__).parent / "horovod_sources"
# A file of Horovod's operations of TensorFlow, words of one of its lines, and what stands in its place:
# operations on GPUs, all of them by NCCL (the letter N), for the one file that does not compile;
# where TensorFlow has the header of streams; and memory of a gather, which is taken as it begins, so
# that gathered weights of the next block do not wait for this one (take_expected.inc, expect_rows.inc).
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
_BUILT_WITH = (
    "import horovod.tensorflow as h; "
    "print('gloo' if h.gloo_built() else '', 'mpi' if h.mpi_built() else '', "
    "'nccl' if h.nccl_built() else '')"
)


def install_horovod():
    """Install Horovod in this environment, from the cache or else from its sources.

    Raises:
        InputError: there is no compiler or no pip, the sources cannot be had or are not
            those that were tested, or they do not compile.
    """
    if importlib.util.find_spec("pip") is None:
        raise InputError(
            f"{sys.prefix} has no pip, which Horovod is installed with: run "
            f"'{sys.executable} -m ensurepip', and then '{COMMAND}' again"
        )
    folder = cache_folder()
    log = folder / "build.log"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        wheel = next(folder.glob("horovod-*.whl"), None) or _build(folder, log)
        pip = [sys.executable, "-m", "pip", "install", "--quiet"]
        problem = f"{wheel.name} cannot be installed; if it is damaged, remove it, beside the log"
        # The one that is there may have been built for another TensorFlow: pip sees no difference.
        run([*pip, "--force-reinstall", "--no-deps", wheel], log, problem)
        run([*pip, wheel], log, problem)
    except OSError as error:
        raise InputError(
            f"Horovod cannot be built in {folder} ({error}): set DTRANSFORMER_CACHE to a folder "
            "that can be written"
        ) from error
    works, found = built_with()
    if not works:
        raise InputError(f"Horovod {VERSION} was installed and cannot be imported: {found}")
    print(f"Horovod {VERSION} is installed, built with {found} ({wheel})")


def built_with(environment=None):
    """Import Horovod in a process of its own: a broken build must not end this one.

    Args:
        environment: dict of variables that the process has besides.

    Returns:
        (works, found): whether it can be imported, and what it was built with (`gloo`,
        `mpi`, `nccl`) or why it cannot be imported, one line.
    """
    command = [sys.executable, "-c", _BUILT_WITH]
    own = {**os.environ, **(environment or {})}
    result = subprocess.run(command, capture_output=True, text=True, env=own)
    if result.returncode:
        return False, (result.stderr.strip().splitlines() or ["it ended without a word"])[-1]
    return True, " ".join(result.stdout.split())


def compiler():
    """Return the C++ compiler's path, that of `CXX` where it is set; None if there is none."""
    named = shlex.split(os.environ.get("CXX", ""))[:1]
    return next(filter(None, map(shutil.which, named or ("g++", "c++"))), None)


def horovodrun():
    """Return the path of horovodrun, that of this environment first; None if there is none."""
    own = shutil.which("horovodrun", path=os.path.dirname(sys.executable))
    return own or shutil.which("horovodrun")


def cache_folder():
    """Return the folder of what was built for this Python, TensorFlow and options."""
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
    own = [file.read_text("utf-8") for file in sorted(_OWN_SOURCES.glob("*.*"))]
    text = repr([own, _EDITS, _OPTIONS, _BUILD_TOOLS, _has_cuda_headers()])
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _has_cuda_headers():
    """Return whether TensorFlow's wheel is one for GPUs, too; on some platforms it is not."""
    folder = pathlib.Path(importlib.util.find_spec("tensorflow").origin).parent
    headers = "include/third_party/gpus/cuda/include/cuda_runtime.h"
    return (folder / headers).exists()


def _build(folder, log):
    """Build the wheel and move it to `folder`; return its path."""
    if compiler() is None:
        raise InputError(
            f"no C++ compiler found ({os.environ.get('CXX') or 'g++, or what CXX names'}): install "
            f"one (Debian: apt-get install g++ make) and run '{COMMAND}' again; one process trains "
            "without"
        )
    tensorflow = importlib.metadata.version("tensorflow")
    print(f"Building Horovod {VERSION} for TensorFlow {tensorflow} (some minutes, once) ...")
    sys.stdout.flush()
    log.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        temporary = pathlib.Path(temporary)
        environment = _build_environment(temporary / "tools", log)
        archive = download(temporary, log, environment)
        source = unpack(archive, temporary)
        pip = [sys.executable, "-m", "pip", "wheel", "--no-cache-dir", "--no-deps"]
        command = [*pip, "--no-build-isolation", "--wheel-dir", temporary / "dist", source]
        run(command, log, "Horovod does not compile", environment)
        built = next((temporary / "dist").glob("horovod-*.whl"))
        _try(built, temporary / "tried", log)
        partial = folder / f"{built.name}.{os.getpid()}.partial"
        shutil.copy(built, partial)
        return partial.rename(folder / built.name)


def _try(wheel, folder, log):
    """Import a wheel from a folder: what cannot be imported replaces nothing that can."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", folder, wheel]
    run(pip, log, f"{wheel.name} cannot be installed")
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    works, found = built_with({"PYTHONPATH": path})
    if not works:
        raise InputError(f"Horovod {VERSION} was compiled and cannot be imported: {found}")


def _build_environment(tools, log):
    """Install what compiling needs in the folder `tools`; return the environment to compile in."""
    # The tools' versions are fixed: constraints of the environment's packages are not theirs. And
    # setuptools runs pip in the folder of the sources, where a relative path names nothing.
    own = {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"}
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", tools]
    run([*pip, *_BUILD_TOOLS], log, f"{', '.join(_BUILD_TOOLS)} cannot be downloaded", own)
    return {
        **own,
        **_OPTIONS,
        "PATH": os.pathsep.join([str(tools / "bin"), os.environ.get("PATH", os.defpath)]),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(tools), os.environ.get("PYTHONPATH")])),
        # Else a make that started this one passes its own on, and Horovod compiles on one core.
        "MAKEFLAGS": f"-j{len(os.sched_getaffinity(0))}",
    }


def download(folder, log, environment=None):
    """Download the sources into `folder` and check them; return their path.

    pip compares the hash before it runs anything that it has downloaded.
    """
    requirement = folder / "requirement.txt"
    requirement.write_text(f"horovod=={VERSION} --hash=sha256:{SHA256}\n")
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-build-isolation"]
    pip += ["--no-binary", ":all:", "--require-hashes", "--dest", folder, "-r", requirement]
    run(pip, log, f"the sources of Horovod {VERSION} cannot be downloaded", environment)
    return next(folder.glob("horovod-*.tar.gz"))


def unpack(archive, folder):
    """Unpack the sources, edit them (`_EDITS`), and add what GPUs need."""
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    source = folder / f"horovod-{VERSION}"
    for name, words, own in _EDITS:
        is_left_out = own == "on_gpus.cmake" and not _has_cuda_headers()
        text = "" if is_left_out else (_OWN_SOURCES / own).read_text("utf-8")
        _replace(source / "horovod/tensorflow" / name, words, text)
    for file in (*_OWN_SOURCES.glob("*.cc"), *_OWN_SOURCES.glob("*.h")):
        shutil.copy(file, source / "horovod/common/ops/cuda")
    return source


def _replace(path, words, text):
    """Put a text in the place of the one line of a file that has some words."""
    lines = path.read_text().splitlines(keepends=True)
    found = [number for number, line in enumerate(lines) if words in line]
    if len(found) != 1:
        raise InputError(
            f"expected one line with {words} in Horovod's {path.name}, found {len(found)}"
        )
    lines[found[0]] = text
    path.write_text("".join(lines))


def run(command, log, problem, environment=None):
    """Run a command with its output at the end of the file `log`.

    Raises:
        InputError: it fails; says `problem` and the line of the output that says why.
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
    raise InputError(
        f"{problem} ({one_line(_reason(text), 100)}); all of what was said is in {log}"
    )


def _reason(text):
    """Return the line of a failed command's output that says best why it failed."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for sign in (" error: ", "CMake Error", "Connection", "ERROR: "):
        for index, line in enumerate(lines):
            if sign in line:
                # CMake says where, and on the next line what.
                return " ".join(lines[index : index + 1 + line.endswith(":")])
    return lines[-1] if lines else "it ended without a word"
