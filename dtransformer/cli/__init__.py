"""The command line: dtransformer prepare, train, launch, generate, chat, plan, and others.

An error is printed in one line of at most 300 characters: with exit code 2 where the user can
correct it, with 1 where something else failed, and DTRANSFORMER_TRACEBACK=1 shows where. Imports
that take long come after the arguments are parsed.
"""

import atexit
import contextlib
import gc
import os
import sys
from collections.abc import Sequence

from dtransformer.cli.options import make_parser
from dtransformer.errors import InputError, is_of_another_rank, one_line, shown

_TRACEBACK = "DTRANSFORMER_TRACEBACK"


def _doctor(arguments):
    if arguments.hosts:
        from dtransformer.cli.doctor import doctor
        from dtransformer.cli.doctor_hosts import examine_hosts

        key = arguments.ssh_identity_file
        return doctor(checks=examine_hosts(arguments.hosts, ["-i", key] if key else []))
    if not arguments.install_horovod:
        from dtransformer.cli.doctor import doctor

        return doctor(arguments.json)
    from dtransformer.cli.install_horovod import InstallError, install_horovod

    try:
        install_horovod()
    except InstallError as error:
        print(f"dtransformer: {error}", file=sys.stderr)
        return error.exit_code


def _run(arguments):
    if arguments.command == "plan":
        from dtransformer.cli.plan import run_plan

        return run_plan(arguments)
    if arguments.command == "launch":
        from dtransformer.cli.launching.supervisor import launch

        return launch(arguments)
    if arguments.command == "new":
        from dtransformer.cli.plan import new

        print(new(arguments.task, arguments.depth, arguments.device, arguments.devices), end="")
        return 0
    import dtransformer.start  # noqa: F401 (first: it keeps notes off the terminal)

    if arguments.command == "prepare":
        from dtransformer.cli.prepare import prepare

        return prepare(arguments)
    if arguments.command == "doctor":
        return _doctor(arguments)
    if arguments.command == "train" and arguments.dry_run:
        from dtransformer.runs.preview import dry_run

        dry_run(arguments.config, arguments.set, sys.stdout.isatty())
    elif arguments.command == "chat":
        from dtransformer.cli.chat import chat, terminal_lines

        chat(arguments, terminal_lines(), sys.stdout)
    elif arguments.command == "train":
        from dtransformer.runs.run import train

        places = arguments.run, arguments.overwrite, arguments.resume
        train(arguments.config, arguments.set, *places, _steps(arguments.profile))
    elif arguments.command == "checkpoint":
        from dtransformer.cli import checkpoint

        if arguments.action == "inspect":
            checkpoint.inspect(arguments.path, arguments.json)
        elif arguments.action == "verify":
            checkpoint.verify(arguments.path)
        else:
            checkpoint.export_weights(
                arguments.path, arguments.out, arguments.with_optimizer, arguments.overwrite
            )
    elif arguments.command == "generate":
        from dtransformer.cli.generate import run_generate

        run_generate(arguments)
    elif arguments.command == "translate":
        from dtransformer.cli.translate import translate

        if sys.stdin is None:
            raise InputError("standard input is closed: give the lines to translate")
        translate(
            arguments.run,
            sys.stdin.buffer,
            sys.stdout,
            arguments.beam_size,
            arguments.length_penalty,
        )
    else:
        from dtransformer.cli.translate import evaluate

        if (arguments.src is None) != (arguments.ref is None):
            raise InputError("--src and --ref go together: give both")
        if arguments.src is None:
            from dtransformer.runs.evaluating import evaluate_run

            evaluate_run(arguments.run, arguments.data, arguments.json)
            return 0
        evaluate(arguments.run, arguments.src, arguments.ref, arguments.json, arguments.beam_size)
    return 0


def _steps(text):
    """Return the first and the last step of a text such as "3-5"; None of None."""
    if text is None:
        return None
    first, _, last = text.partition("-")
    if not (first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last)):
        raise InputError(f"--profile {shown(text)}: expected two numbers of steps, such as 3-5")
    return int(first), int(last)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code.

    Args:
        argv: the arguments; None for those of the process.
    """
    if argv is None:  # the process is ours: it ends without a last search for garbage
        atexit.register(gc.freeze)
    try:
        if sys.stdout is None:
            raise InputError("standard output is closed: send it to a file, or to /dev/null")
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):  # whatever the locale can say
                stream.reconfigure(encoding="utf-8", errors="backslashreplace")
        code = _run(make_parser().parse_args(argv)) or 0
        sys.stdout.flush()
        return code
    except InputError as error:
        return _tell(error, 2)
    except BrokenPipeError:  # whoever read our output has ended, such as head
        _drop_output()
        return 1
    except KeyboardInterrupt:
        return _tell("interrupted", 130)
    except OSError as error:
        _drop_output()
        place = "standard output" if error.filename is None else error.filename
        return _tell(f"{place}: {error.strerror or error}", 2)
    except MemoryError:
        return _tell("this machine has not enough memory for that: give smaller numbers", 2)
    except Exception as error:
        sys.last_value = error  # what is done at exit depends on it
        if is_of_another_rank(error):
            return _tell("another rank has failed, or left: what it says tells why", 1)
        if os.environ.get(_TRACEBACK) or "HOROVOD_RANK" in os.environ:
            raise  # of several ranks each tells its own
        text = one_line(error, 160)
        return _tell(f"{type(error).__name__}: {text}; {_TRACEBACK}=1 shows where it comes from", 1)


def _tell(message, code):
    """Print an error, as one line; return the exit code."""
    with contextlib.suppress(OSError):  # there is no one to tell
        print(one_line(f"dtransformer: {message}"), file=sys.stderr, flush=True)
    return code


def _drop_output():
    """Let what was not written yet go nowhere: Python would write it once more at its end."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
