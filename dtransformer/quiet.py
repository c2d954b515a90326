"""Keep start-up messages of Keras and TensorFlow off the terminal.

On a machine without a GPU, TensorFlow prints many lines about CUDA and CPU instructions before its
log level applies. It writes to the process's standard error directly, so the file descriptor must
be redirected. The text is printed if the start fails. TF_CPP_MIN_LOG_LEVEL=0 disables the
redirection.
"""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from typing import NoReturn


def refuse_backend(backend: str) -> NoReturn:
    """Stop because Keras uses another backend than TensorFlow.

    The command line prints one line and exits with code 2.

    Raises:
        ImportError: If the program is not the command `dtransformer`.
    """
    message = (
        f"dtransformer needs the Keras backend 'tensorflow', got {backend[:60]!r}. "
        "Set KERAS_BACKEND=tensorflow."
    )
    is_module = sys.orig_argv[1:3] == ["-m", "dtransformer.cli"]
    if is_module or os.path.basename(sys.argv[0]) == "dtransformer":
        print(f"dtransformer: {message}", file=sys.stderr)
        sys.exit(2)
    raise ImportError(message)


@contextlib.contextmanager
def quiet_start() -> Iterator[None]:
    """Context manager that hides standard error and prints it only if an exception is raised."""
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL") == "0":
        yield
        return
    try:
        terminal = os.dup(2)
    except OSError:  # The process has no standard error.
        yield
        return
    with tempfile.TemporaryFile() as buffer:
        sys.stderr.flush()
        os.dup2(buffer.fileno(), 2)
        try:
            yield
        except BaseException:
            buffer.seek(0)
            os.write(terminal, buffer.read())
            raise
        finally:
            os.dup2(terminal, 2)
            os.close(terminal)
