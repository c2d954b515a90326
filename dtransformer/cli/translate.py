"""`dtransformer translate` and `dtransformer evaluate`: translating with the model of a run."""

import json
import os
import sys
from collections.abc import Callable
from typing import BinaryIO, TextIO

from dtransformer.datasets.text import read_pairs
from dtransformer.inputs.files import read_limited
from dtransformer.inputs.text import decode_lines
from dtransformer.models.translator import Translator
from dtransformer.runs import needs
from dtransformer.runs.loading import load_run


def make_translator(
    run_folder: str | os.PathLike,
    beam_size: int | None = None,
    length_penalty: float | None = None,
) -> Callable[[list[str]], list[str]]:
    """Return a function that translates with the model of a run; it warns of long sentences.

    Args:
        run_folder: the run's folder.
        beam_size, length_penalty: as in `Translator`; None for the run's own.

    Returns:
        A function of sentences, which raises an InputError where this machine cannot hold their
        search.

    Raises:
        InputError: the run folder is not usable.
    """
    run = load_run(run_folder, task="translation")
    config, model, tokenizer = run.config, run.network, run.tokenizer

    def warn(number, length, limit):
        print(
            f"dtransformer: warning: line {number + 1} has {length} tokens; only the first {limit} "
            "are translated",
            file=sys.stderr,
        )

    search = config.search
    beam_size = search.beam_size if beam_size is None else beam_size
    needs.check_search(config, tokenizer.vocab_size, beam_size)
    translator = Translator(
        model,
        tokenizer,
        beam_size=beam_size,
        length_penalty=search.length_penalty if length_penalty is None else length_penalty,
        max_length=search.max_length,
        max_source_length=config.data.max_length,
        on_truncation=warn,
    )

    def checked(sentences):
        at_once = max(1, min(len(sentences), translator.batch_size))
        needs.check_search(config, tokenizer.vocab_size, beam_size, at_once)
        return translator(sentences)

    return checked


def translate(
    run_folder: str | os.PathLike,
    source: BinaryIO,
    destination: TextIO,
    beam_size: int | None = None,
    length_penalty: float | None = None,
) -> None:
    """Translate the lines of a binary stream to a text stream.

    Raises:
        InputError: the run folder is not usable, or a line is not UTF-8.
    """
    translator = make_translator(run_folder, beam_size, length_penalty)
    lines = decode_lines(read_limited(source, "standard input"), "standard input")
    for translation in translator(lines):
        print(translation, file=destination)


def evaluate(
    run_folder: str | os.PathLike,
    source_path: str | os.PathLike,
    reference_path: str | os.PathLike,
    as_json: bool = False,
    beam_size: int | None = None,
) -> None:
    """Translate a file and print its sacreBLEU score with the signature.

    Raises:
        InputError: the run folder or a file is not usable, or the files' lengths differ.
    """
    from sacrebleu.metrics import BLEU

    source, references = read_pairs(source_path, reference_path)
    metric = BLEU()
    translations = make_translator(run_folder, beam_size)(source)
    score = metric.corpus_score(translations, [references])
    if as_json:
        result = {
            "bleu": score.score,
            "signature": str(metric.get_signature()),
            "sentences": len(source),
            "details": str(score),
        }
        print(json.dumps(result))
    else:
        print(score.format(signature=str(metric.get_signature())))
