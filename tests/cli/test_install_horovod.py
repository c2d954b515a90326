"""A failed installation of Horovod prints one line and leaves nothing incomplete.

The tests with several ranks show that a built Horovod works. These tests need no network and do not
change the environment.
"""

import io
import tarfile

import pytest

from dtransformer.cli import install_horovod, main
from dtransformer.cli.install_horovod import download, unpack
from dtransformer.errors import InputError

FOLDER = "horovod-0.28.1/horovod"
LISTING, OPERATIONS = f"{FOLDER}/tensorflow/CMakeLists.txt", f"{FOLDER}/tensorflow/mpi_ops.cc"
INCLUDE = '#include "tensorflow/compiler/xla/stream_executor/stream.h"\n'
ALLOCATED = "Status status = context_->allocate_output(output_index, tf_shape, &tf_tensor);\n"
GATHERED = "auto enqueue_result = EnqueueTensorAllgather(\n"


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """Empty cache, and a pip that finds packages in `packages/` only."""
    monkeypatch.delenv("CXX", raising=False)
    (tmp_path / "packages").mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "packages"))
    monkeypatch.setenv("DTRANSFORMER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def sources(folder, listing, operations=INCLUDE + ALLOCATED + GATHERED):
    """Write an archive with two of Horovod's files and return its path."""
    path = folder / "horovod-0.28.1.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        files = {LISTING: listing, OPERATIONS: operations, f"{FOLDER}/common/ops/cuda/a.cu": ""}
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    return path


def refusal(capsys):
    """Return the single line that the command printed."""
    error = capsys.readouterr().err
    assert error.startswith("dtransformer: ") and error.count("\n") == 1
    return error


@pytest.mark.parametrize("named", [None, "no-such-compiler -O2"])
def test_install_horovod_fails_without_a_compiler(named, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    if named:
        monkeypatch.setenv("CXX", named)
    assert main(["doctor", "--install-horovod"]) == 2
    error = refusal(capsys)
    assert "apt-get install g++" in error and "single process" in error
    assert (named or "g++") in error


def test_install_horovod_fails_without_a_network(cache, capsys):
    assert main(["doctor", "--install-horovod"]) == 2
    error = refusal(capsys)
    assert "Cannot download cmake" in error
    (log,) = cache.rglob("build.log")
    assert log.name in error and not list(cache.rglob("*.whl*"))


def test_rejects_horovod_sources_with_another_hash(tmp_path, cache):
    sources(tmp_path / "packages", "")
    (tmp_path / "new").mkdir()
    with pytest.raises(InputError, match="DO NOT MATCH THE HASHES") as caught:
        download(tmp_path / "new", tmp_path / "log")
    assert "\n" not in str(caught.value)
    assert "egg_info" not in (tmp_path / "log").read_text()


def test_horovod_sources_are_edited(tmp_path):
    listing = "list(a.cc)\nlist(xla_mpi_ops.cc)\nlist(b.cc)\n"
    text = f"// first\n{INCLUDE}{ALLOCATED}{GATHERED}// last\n"
    unpack(sources(tmp_path, listing, text), tmp_path)
    first, *on_gpus, last = (tmp_path / LISTING).read_text().splitlines()
    assert (first, last) == ("list(a.cc)", "list(b.cc)")
    assert any("nccl_operations" in line for line in on_gpus)
    assert not any("xla_mpi_ops" in line for line in on_gpus)
    operations = (tmp_path / OPERATIONS).read_text()
    assert operations.startswith("// first\n") and operations.endswith("// last\n")
    assert "AsGpuStreamValue" in operations and INCLUDE not in operations
    assert operations.index("mutable_output(") < operations.index(ALLOCATED)
    assert operations.index("allocate_output(0, expected") < operations.index(GATHERED)
    names = {file.name for file in (tmp_path / FOLDER / "common/ops/cuda").iterdir()}
    assert names == {"a.cu", "cuda_kernels.cc", "nccl.h"}


@pytest.mark.parametrize("listing", ["list(a.cc)\n", "xla_mpi_ops.cc\n" * 2])
def test_rejects_unexpected_horovod_sources(listing, tmp_path):
    with pytest.raises(InputError, match=r"Expected one line with xla_mpi_ops.cc.*found [02]"):
        unpack(sources(tmp_path, listing), tmp_path)


def test_broken_wheel_is_not_cached(monkeypatch, tmp_path):
    monkeypatch.setattr(install_horovod, "run", lambda *arguments: None)
    (tmp_path / "tried/horovod").mkdir(parents=True)
    (tmp_path / "tried/horovod/__init__.py").write_text("raise ImportError('undefined symbol')")
    with pytest.raises(InputError, match="compiled, but cannot be imported.*undefined symbol"):
        install_horovod._try(tmp_path / "horovod.whl", tmp_path / "tried", tmp_path / "log")


def test_reports_a_damaged_wheel_in_the_cache(cache, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    assert main(["doctor", "--install-horovod"]) == 2  # makes the cache's folder
    (folder,) = (cache / "wheels").iterdir()
    (folder / "horovod-0.28.1-py3-none-any.whl").write_bytes(b"")
    capsys.readouterr()
    assert main(["doctor", "--install-horovod"]) == 2
    assert "Cannot install horovod-0.28.1-py3-none-any.whl" in refusal(capsys)


def test_reports_an_unwritable_cache(cache, capsys):
    cache.write_text("a file")
    assert main(["doctor", "--install-horovod"]) == 2
    error = refusal(capsys)
    assert str(cache) in error and "DTRANSFORMER_CACHE" in error


def test_wheel_of_this_environment_supports_gpus():
    works, result = install_horovod.built_with()
    if not works:
        pytest.skip("Horovod is not installed: dtransformer doctor --install-horovod")
    assert "gloo" in result and "nccl" in result


def test_build_ignores_pip_constraints(tmp_path, monkeypatch):
    """setuptools runs pip in the folder of the sources, where relative paths are wrong."""
    monkeypatch.setenv("PIP_CONSTRAINT", "constraints.txt")
    monkeypatch.setattr(install_horovod, "run", lambda *arguments: None)
    environment = install_horovod._build_environment(tmp_path, tmp_path / "log")
    assert "PIP_CONSTRAINT" not in environment and environment["HOROVOD_WITH_GLOO"] == "1"
