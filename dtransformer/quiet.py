"""Quiet start of Keras and TensorFlow: notes stay off the terminal.

On a machine without a GPU, TensorFlow writes half a screen about CUDA and CPU
instructions before its log level applies. They go to the process' standard error
directly, so that only redirecting its file descriptor keeps them away. What was
written comes out after all where the start fails, or where the environment sets
TF_CPP_MIN_LOG_LEVEL to 0.
"""

import contextlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import NoReturn


def refuse_backend(backend: str) -> NoReturn:
    """Refuse another backend of Keras than TensorFlow's; as the command line does, in one line.

    Raises:
        ImportError: in any program but the command.
    """
    message = (
        f"dtransformer needs Keras' TensorFlow backend, and Keras is to use {backend[:60]!r}: set "
        "KERAS_BACKEND=tensorflow"
    )
    is_module = sys.orig_argv[1:3] == ["-m", "dtransformer.cli"]
    if is_module or os.path.basename(sys.argv[0]) == "dtransformer":
        print(f"dtransformer: {message}", file=sys.stderr)
        sys.exit(2)
    raise ImportError(message)


@contextlib.contextmanager
def quiet_start() -> Iterator[None]:
    """Hold back what is written to standard error; show it if an exception passes."""
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL") == "0":
        yield
        return
    try:
        terminal = os.dup(2)
    except OSError:  # there is no standard error
        yield
        return
    with tempfile.TemporaryFile() as held:
        sys.stderr.flush()
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException:
            held.seek(0)
            os.write(terminal, held.read())
            raise
        finally:
            os.dup2(terminal, 2)
            os.close(terminal)


class _QuietTensorFlow:
    """Import hook that runs the import of TensorFlow inside `quiet_start`."""

    def find_spec(self, name, path=None, target=None):
        if name != "tensorflow":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None:
            execute = spec.loader.exec_module
            spec.loader.exec_module = quiet_start()(execute)
        return spec


def quiet_tensorflow() -> None:
    """Keep the notes of TensorFlow off the terminal, also if a script imports Keras first."""
    if "tensorflow" not in sys.modules:
        sys.meta_path.insert(0, _QuietTensorFlow())
