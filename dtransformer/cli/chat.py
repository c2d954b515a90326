"""`dtransformer chat`: chat with a model in the terminal."""

import argparse
import os
from collections.abc import Iterable
from typing import TextIO

_HELP = "Enter /reset to start a new conversation, /quit to exit."


def chat(
    arguments: argparse.Namespace, lines: Iterable[str] | None = None, out: TextIO | None = None
) -> None:
    """Answer the lines of the user until they end. Each answer depends on all previous turns.

    Args:
        arguments: Options of the command.
        lines: Lines of the user. Defaults to the lines typed in the terminal.
        out: Stream to print to. Defaults to standard output.

    Raises:
        InputError: If the folder has no model that generates text, or no chat template.
    """
    from dtransformer.datasets.tool_calls import tools_in
    from dtransformer.models import TextGenerator
    from dtransformer.runs.loading import opened

    tokenizer, model = opened(arguments.model, "float32", arguments.adapters)
    generate = TextGenerator(
        model, tokenizer, arguments.max_new_tokens, temperature=arguments.temperature
    )
    first = [{"role": "system", "content": arguments.system}] if arguments.system else []
    tools = tools_in(getattr(arguments, "tools", None))
    # Check the template before the first question.
    tokenizer.chat([*first, {"role": "user", "content": "?"}], tools)
    print(_HELP, file=out, flush=True)
    turns = list(first)

    def show(_, part):
        print(part, end="", flush=True, file=out)

    for line in terminal_lines() if lines is None else lines:
        text = line.strip()
        if text == "/quit":
            break
        if text == "/reset":
            turns = list(first)
        if not text or text == "/reset":
            continue
        turns.append({"role": "user", "content": text})
        try:
            (answer,) = generate([tokenizer.chat(turns, tools)], show)
        except ValueError as error:  # The conversation has become too long for the model.
            text = str(error).rstrip(".")
            print(f"{text}. Enter /reset, or use a smaller --max-new-tokens.", file=out, flush=True)
            turns.pop()
            continue
        print(file=out)
        turns.append({"role": "assistant", "content": answer})


def terminal_lines() -> Iterable[str]:
    """Yield the lines typed in the terminal until the end of input.

    A terminal shows a prompt before each line.
    """
    while True:
        try:
            yield input("> " if os.isatty(0) else "")
        except EOFError:
            return
