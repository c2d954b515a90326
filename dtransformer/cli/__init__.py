"""Command line: dtransformer prepare, train, launch, generate, chat, plan and other commands.

An error is printed as one line of at most 300 characters. The exit code is 2 for errors that the user
can correct and 1 for other failures. DTRANSFORMER_TRACEBACK=1 also prints the traceback. Slow imports
follow after the arguments are parsed.
"""

import atexit
import contextlib
import gc
import importlib
import os
import sys
import warnings
from collections.abc import Sequence

from dtransformer.cli.options import make_parser
from dtransformer.errors import InputError, format_warning, is_from_other_rank, to_one_line

_TRACEBACK = "DTRANSFORMER_TRACEBACK"


def _run(arguments):
    if "run_by" not in arguments:
        return arguments.print_help()
    if not arguments.without_tensorflow:
        import dtransformer.start  # noqa: F401 (imported first, to hide TensorFlow's log)
    module, _, function = arguments.run_by.rpartition(".")
    return getattr(importlib.import_module(f"dtransformer.{module}"), function)(arguments)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    Args:
        argv: Sequence of arguments. `None` uses the arguments of the process.
    """
    if argv is None:  # The process belongs to the command: skip the final garbage collection.
        atexit.register(gc.freeze)
        warnings.formatwarning = format_warning
    try:
        if sys.stdout is None:
            raise InputError("Standard output is closed. Redirect it to a file or to /dev/null.")
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):  # Do not depend on the locale.
                stream.reconfigure(encoding="utf-8", errors="backslashreplace")
        code = _run(make_parser().parse_args(argv)) or 0
        sys.stdout.flush()
        return code
    except InputError as error:
        return _print_error(error, 2)
    except BrokenPipeError:  # The reader of the output has ended, such as `head`.
        _drop_output()
        return 1
    except KeyboardInterrupt as error:
        if os.environ.get("HOROVOD_RANK", "0") == "0":
            print(f"dtransformer: {error or 'interrupted'}", file=sys.stderr, flush=True)
        return 130
    except OSError as error:
        _drop_output()
        place = "standard output" if error.filename is None else error.filename
        return _print_error(f"{place}: {error.strerror or error}", 2)
    except MemoryError:
        return _print_error("This machine does not have enough memory. Reduce the sizes.", 2)
    except Exception as error:
        sys.last_value = error  # Exit handlers read it.
        if is_from_other_rank(error):
            return _print_error(
                "Another rank has failed or left the job. Its output shows the cause.", 1
            )
        if os.environ.get(_TRACEBACK) or "HOROVOD_RANK" in os.environ:
            raise  # Each rank prints its traceback.
        text = to_one_line(error, 160)
        return _print_error(
            f"{type(error).__name__}: {text}; {_TRACEBACK}=1 prints the traceback", 1
        )


def _print_error(message, code):
    """Print an error as one line and return the exit code."""
    with contextlib.suppress(OSError):  # Standard error may be closed.
        print(to_one_line(f"dtransformer: {message}"), file=sys.stderr, flush=True)
    return code


def _drop_output():
    """Discard buffered output, because Python would try to write it again at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
