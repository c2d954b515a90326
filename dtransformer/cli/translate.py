"""`dtransformer translate` and `dtransformer evaluate`."""

import argparse
import json
import os
import sys
from collections.abc import Callable

from dtransformer.datasets.text import read_pairs
from dtransformer.errors import InputError, raise_as_input_error
from dtransformer.inputs.text import read_input_lines
from dtransformer.models.generation.text_generator import TextGenerator
from dtransformer.runs import needs
from dtransformer.runs.evaluating import evaluate_run
from dtransformer.runs.tasks import load_run


def make_translator(
    run_folder: str | os.PathLike, beam_size: int | None = None, length_penalty: float | None = None
) -> Callable[[list[str]], list[str]]:
    """Return a function that translates sentences with the model of a run.

    Sentences with more tokens than `data.max_length` are truncated with a warning.

    Args:
        run_folder: Folder of the run.
        beam_size: Integer. Number of hypotheses. Defaults to the run's `search.beam_size`.
        length_penalty: Float. Exponent of the length penalty. Defaults to the run's
            `search.length_penalty`.

    Returns:
        A function from a list of sentences to a list of translations. It raises an `InputError` if
        the search does not fit in memory.

    Raises:
        InputError: If the run folder is unusable.
    """
    run = load_run(run_folder, task="translation")
    config = run.config
    model = run.network
    tokenizer = run.tokenizer

    def warn(index, length, limit):
        print(
            f"dtransformer: warning: line {index + 1} has {length} tokens; only the first {limit} "
            "are translated",
            file=sys.stderr,
        )

    search = config.search
    beam_size = search.beam_size if beam_size is None else beam_size
    with raise_as_input_error(kinds=ValueError):
        translator = TextGenerator(
            model,
            tokenizer,
            beam_size=beam_size,
            length_penalty=search.length_penalty if length_penalty is None else length_penalty,
            max_new_tokens=search.max_length,
            batch_size=64,
            max_source_length=config.data.max_length,
            on_truncation=warn,
        )

    def checked(sentences):
        at_once = max(1, min(len(sentences), translator.batch_size))
        needs.check_search(config, tokenizer.vocab_size, beam_size, at_once)
        return translator(sentences)

    return checked


def translate(arguments: argparse.Namespace) -> None:
    """Translate the lines of standard input, and print the translations.

    Raises:
        InputError: If the run folder is unusable, or a line is not UTF-8.
    """
    lines = read_input_lines("Write the lines to translate to it.")
    translator = make_translator(arguments.run, arguments.beam_size, arguments.length_penalty)
    for translation in translator(lines):
        print(translation)


def evaluate(arguments: argparse.Namespace) -> None:
    """Print loss and metrics of a run, or BLEU with sacreBLEU's signature for `--src` and `--ref`.

    Raises:
        InputError: If the run folder or a file is unusable, options exclude each other, or the files
            of `--src` and `--ref` differ in length.
    """
    if (arguments.src is None) != (arguments.ref is None):
        raise InputError("--src and --ref require each other. Add both.")
    unused, how = ("beam_size", "without") if arguments.src is None else ("data", "with")
    if getattr(arguments, unused):
        option = unused.replace("_", "-")
        raise InputError(f"--{option} has no effect {how} --src and --ref. Remove it.")
    if arguments.src is None:
        evaluate_run(arguments.run, arguments.data, arguments.json)
        return
    from sacrebleu.metrics import BLEU

    source, references = read_pairs(arguments.src, arguments.ref)
    metric = BLEU()
    translations = make_translator(arguments.run, arguments.beam_size)(source)
    score = metric.corpus_score(translations, [references])
    signature = str(metric.get_signature())
    if arguments.json:
        result = {"bleu": score.score, "signature": signature, "sentences": len(source)}
        print(json.dumps({**result, "details": str(score)}))
    else:
        print(score.format(signature=signature))
