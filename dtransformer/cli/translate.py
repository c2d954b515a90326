"""`dtransformer translate` and `dtransformer evaluate`: what a run folder is for."""

import json
import sys

from dtransformer.cli import runs
from dtransformer.datasets.sgm import decode_lines
from dtransformer.datasets.text import read_lines
from dtransformer.errors import InputError
from dtransformer.models.translator import Translator


def make_translator(run_folder, beam_size=None, length_penalty=None):
    """Return a `Translator` for a run folder; warns of sentences that are cut off."""
    config, model, tokenizer = runs.load_run(run_folder)

    def warn(number, length, limit):
        print(
            f"dtransformer: warning: line {number + 1} has {length} tokens; only the first {limit} "
            "are translated",
            file=sys.stderr,
        )

    search = config.search
    return Translator(
        model,
        tokenizer,
        beam_size=search.beam_size if beam_size is None else beam_size,
        length_penalty=search.length_penalty if length_penalty is None else length_penalty,
        max_length=search.max_length,
        max_source_length=config.data.max_length,
        on_truncation=warn,
    )


def translate(run_folder, source, destination, beam_size=None, length_penalty=None):
    """Translate the lines of a binary stream to a text stream.

    Raises:
        InputError: the run folder is not usable, or a line is no UTF-8.
    """
    translator = make_translator(run_folder, beam_size, length_penalty)
    for translation in translator(decode_lines(source.read(), "standard input")):
        print(translation, file=destination)


def evaluate(run_folder, source_path, reference_path, as_json=False, beam_size=None):
    """Translate a file and print its sacreBLEU score with the signature.

    Raises:
        InputError: the run folder or a file is not usable, or the files' lengths differ.
    """
    from sacrebleu.metrics import BLEU

    source, references = read_lines(source_path), read_lines(reference_path)
    if len(source) != len(references):
        raise InputError(
            f"{source_path} has {len(source)} sentences and {reference_path} {len(references)}: "
            "they have to pair up line by line"
        )
    if not source:
        raise InputError(f"{source_path}: there is no sentence in it")
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
