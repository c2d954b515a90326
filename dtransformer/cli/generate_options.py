"""The options of `dtransformer generate`."""

import argparse
import sys

from dtransformer.cli.options import Text, number

_MOST = 2**20
BOUNDARIES = "line", "blank_line", "file"
_INTS = {
    "top_k": ("draw from so many of the most likely tokens only", 0),
    "no_repeat_ngram_size": ("so many tokens follow each other once only", 0),
    "min_new_tokens": ("so many tokens come before one may end a text", 0),
    "beam_size": ("hypotheses; 1 is greedy search, or drawing", 1),
    "num_return_sequences": ("texts of each prompt", 1),
}
_FLOATS = {
    "temperature": "above 0, draw tokens; 0 for the most likely ones, by default",
    "top_p": "draw from the fewest tokens that are as likely together",
    "min_p": "draw from tokens at least as likely as this share of the likeliest",
    "repetition_penalty": "above 1, tokens that are there already are less likely",
    "length_penalty": "exponent of the length penalty of beams",
}


def add_generate(commands) -> None:
    """Add the command to argparse's subparsers."""
    parser = commands.add_parser(
        "generate", help="continue texts, those of standard input line by line"
    )
    parser.add_argument(
        "--model", required=True, help="a folder with a published model and its tokenizer"
    )
    parser.add_argument(
        "--adapters", metavar="FOLDER", help="low-rank adapters, as save_lora or peft writes them"
    )
    parser.add_argument(
        "--prompt", type=Text, action="append", metavar="TEXT",
        help="a text; standard input is not read then",
    )  # fmt: skip
    parser.add_argument(
        "--boundary", choices=BOUNDARIES, default="line",
        help="what ends a prompt of standard input; line by default",
    )  # fmt: skip
    parser.add_argument(
        "--chat", action="store_true", help="prompts are a user's messages: by the chat template"
    )
    parser.add_argument("--system", type=Text, metavar="TEXT", help="the message before them")
    parser.add_argument(
        "--max-new-tokens", type=number(1, _MOST), default=64, metavar="N",
        help="most tokens that come after a text",
    )  # fmt: skip
    for name, message in _FLOATS.items():
        parser.add_argument(_option(name), type=float, metavar="X", help=message)
    for name, (message, least) in _INTS.items():
        parser.add_argument(_option(name), type=number(least, _MOST), metavar="N", help=message)
    parser.add_argument("--seed", type=number(0, 2**31 - 1), metavar="N", help="for drawing")
    parser.add_argument(
        "--stop", type=Text, action="append", default=[], metavar="TEXT",
        help="a token that ends texts, besides the model's own",
    )  # fmt: skip
    parser.add_argument("--stream", action="store_true", help="write tokens as they are found")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each text")
    parser.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE",
        help="how to divide the work, such as parallel.model_parallel=2; training.precision",
    )  # fmt: skip


def run_generate(arguments: argparse.Namespace) -> None:
    """Run the command; errors as of `cli.generate.generate`."""
    from dtransformer.cli.generate import generate

    names = [*_FLOATS, *_INTS, "seed"]
    given = {name: getattr(arguments, name) for name in names}
    generate(
        arguments.model,
        None if sys.stdin is None else sys.stdin.buffer,
        sys.stdout,
        arguments.prompt,
        arguments.set,
        arguments.max_new_tokens,
        arguments.stop,
        arguments.stream,
        arguments.json,
        adapters=arguments.adapters,
        boundary=arguments.boundary,
        is_chat=arguments.chat,
        system=arguments.system,
        **{name: value for name, value in given.items() if value is not None},
    )


def _option(name):
    return f"--{name.replace('_', '-')}"
