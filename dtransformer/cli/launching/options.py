"""The options of `dtransformer launch`."""

import argparse

from dtransformer.cli.options import number
from dtransformer.errors import InputError


def add_launch(commands) -> None:
    """Add the command to argparse's subparsers."""
    parser = commands.add_parser(
        "launch", help="start ranks, and start them again after a failure",
        usage="dtransformer launch [OPTIONS] -- COMMAND",
    )  # fmt: skip
    parser.add_argument(
        "-np", "--ranks", type=number(1, 2**20), metavar="N", help="ranks at most; by default all"
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--hosts", metavar="FILE", help="a host a line, such as 'node1 slots=4'")
    where.add_argument("--host-discovery-script", metavar="SCRIPT", help="prints such lines")
    parser.add_argument(
        "--restarts", type=number(0, 10**6), default=3, metavar="N", help="failures borne; 3"
    )
    parser.add_argument(
        "--min-ranks", type=number(1, 2**20), metavar="N",
        help="go on with so few, on another layout; by default with all only",
    )  # fmt: skip
    parser.add_argument(
        "--cool-down", type=number(0, 10**6), default=120, metavar="SECONDS",
        help="for which a host that failed is left out; 120",
    )  # fmt: skip
    parser.add_argument(
        "--wait", type=number(0, 10**6), default=600, metavar="SECONDS",
        help="for hosts, where there are too few; 600",
    )  # fmt: skip
    parser.add_argument("--ssh-identity-file", metavar="FILE", help="as horovodrun's")
    parser.add_argument("--ssh-port", type=number(1, 65535), metavar="PORT", help="as horovodrun's")
    parser.add_argument("--network-interface", metavar="NAME", help="as horovodrun's")
    parser.add_argument(
        "rank_command", nargs=argparse.REMAINDER, metavar="COMMAND", help="of each rank"
    )


def run_launch(arguments: argparse.Namespace) -> int:
    """Launch as the options say; return the exit code.

    Raises:
        InputError: an option or the hosts are wrong.
    """
    from dtransformer.cli.launching.supervisor import Options, Supervisor

    command = arguments.rank_command
    command = command[1:] if command[:1] == ["--"] else command
    if not command:
        raise InputError("there is no command: give it after --, as in launch -np 2 -- python x.py")
    return Supervisor(
        Options(
            command,
            arguments.ranks,
            arguments.hosts,
            arguments.host_discovery_script,
            arguments.restarts,
            arguments.min_ranks,
            float(arguments.cool_down),
            float(arguments.wait),
            arguments.ssh_identity_file,
            arguments.ssh_port,
            arguments.network_interface,
        )
    ).run()
