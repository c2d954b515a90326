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

from dtransformer.cli.chat import add_chat
from dtransformer.cli.generate_options import add_generate, run_generate
from dtransformer.cli.launching.options import add_launch, run_launch
from dtransformer.cli.options import Parser, Text, add_train, option_of
from dtransformer.cli.plan import add_plan, run_plan
from dtransformer.cli.prepare import add_options, prepare
from dtransformer.errors import InputError, one_line
from dtransformer.runs.options import SECTIONS
from dtransformer.version import __version__

_TRACEBACK = "DTRANSFORMER_TRACEBACK"


def _parser():
    parser = Parser(
        prog="dtransformer", description="Train Transformers on many devices, and translate."
    )
    parser.add_argument("--version", action="version", version=f"dtransformer {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    add_options(commands.add_parser("prepare", help="write the files that training reads"))

    add_train(commands)
    add_launch(commands)

    translate = commands.add_parser("translate", help="translate standard input, line by line")
    evaluate = commands.add_parser("evaluate", help="score a run on records, or translations")
    for command in (translate, evaluate):
        command.add_argument("--run", required=True, help="a run folder")
        command.add_argument(
            "--beam-size", type=option_of("search.beam_size"),
            help="hypotheses; 1 is greedy search",
        )  # fmt: skip
    translate.add_argument(
        "--length-penalty", type=option_of("search.length_penalty"),
        help="exponent of the length penalty",
    )  # fmt: skip
    evaluate.add_argument(
        "--data",
        nargs="+",
        default=[],
        metavar="FILE",
        help="records; the run's data.dev by default",
    )
    sentences = evaluate.add_argument_group("of translation: sentences, one a line, or .sgm")
    sentences.add_argument("--src", help="those to translate")
    sentences.add_argument("--ref", help="their reference translations")
    evaluate.add_argument("--json", action="store_true", help="print JSON")

    new = commands.add_parser("new", help="print a config file of a task, to begin with")
    new.add_argument("task", type=Text, metavar="TASK", help=", ".join(SECTIONS))

    add_generate(commands)
    add_chat(commands)
    add_plan(commands)

    checkpoint = commands.add_parser("checkpoint", help="look at checkpoints, and export them")
    actions = checkpoint.add_subparsers(dest="action", required=True, metavar="ACTION")
    inspect = actions.add_parser("inspect", help="tell what a checkpoint holds")
    inspect.add_argument("--json", action="store_true", help="print JSON")
    verify = actions.add_parser("verify", help="compare all files with their checksums")
    export = actions.add_parser("export", help="write the weights for one process")
    export.add_argument("--out", required=True, help="a .weights.h5 or .safetensors file")
    export.add_argument(
        "--with-optimizer", action="store_true", help="the optimizer's states, too (.safetensors)"
    )
    export.add_argument("--overwrite", action="store_true", help="replace a file that is there")
    for action in (inspect, verify, export):
        action.add_argument("path", help="a checkpoint, or a folder of checkpoints")

    doctor = commands.add_parser("doctor", help="say what is installed and what works")
    instead = doctor.add_mutually_exclusive_group()
    instead.add_argument("--json", action="store_true", help="print JSON")
    instead.add_argument(
        "--install-horovod", action="store_true",
        help="install Horovod, which several ranks need: it is compiled here, once",
    )  # fmt: skip
    instead.add_argument("--hosts", metavar="A,B", help="whether hosts can train together")
    doctor.add_argument("--ssh-identity-file", metavar="FILE", help="for --hosts")
    return parser


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
        return run_plan(arguments)
    if arguments.command == "launch":
        return run_launch(arguments)
    if arguments.command == "new":
        from dtransformer.runs.preview import new_config

        print(new_config(arguments.task), end="")
        return 0
    import dtransformer.start  # noqa: F401 (first: it keeps notes off the terminal)

    if arguments.command == "prepare":
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

        train(arguments.config, arguments.set, arguments.run, arguments.overwrite, arguments.resume)
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
        code = _run(_parser().parse_args(argv)) or 0
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
        if os.environ.get(_TRACEBACK) or "HOROVOD_RANK" in os.environ:
            raise  # of several ranks each tells its own
        sys.last_value = error  # what is done at exit depends on it
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
