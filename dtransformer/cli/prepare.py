"""`dtransformer prepare`: the files that training reads."""

import argparse

from dtransformer.cli.options import number
from dtransformer.errors import InputError

_OF_LM = "input", "tokenizer", "train_tokenizer", "field", "documents", "sentences", "shard_tokens"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `prepare` to its parser."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--source", help="a folder or tar archive with WMT14's newstest2014 files")
    source.add_argument(
        "--download", action="store_true", help="download the official archive, and check it"
    )
    source.add_argument(
        "--embedded", action="store_true", help="generate the embedded English-French corpus"
    )
    source.add_argument(
        "--lm", action="store_true", help="write token shards of documents, for language models"
    )
    parser.add_argument("--out", required=True, help="the folder to write")
    parser.add_argument(
        "--seed", type=number(0, 2**31 - 1), default=0, help="of the embedded corpus"
    )
    parser.add_argument(
        "--num-train", type=number(0, 200_000), default=30_000,
        help="training pairs of the embedded corpus",
    )  # fmt: skip
    parser.add_argument(
        "--overwrite", action="store_true", help="replace files that are there with other content"
    )
    lm = parser.add_argument_group("with --lm")
    lm.add_argument(
        "--input", nargs="+", metavar="FILE",
        help="text, .jsonl, .arrow or .parquet; text and .jsonl may be packed, .gz",
    )  # fmt: skip
    which = lm.add_mutually_exclusive_group()
    which.add_argument(
        "--tokenizer", metavar="FOLDER",
        help="a tokenizer's folder: of ours, with a tokenizer.json, or with SentencePiece's model",
    )  # fmt: skip
    which.add_argument(
        "--train-tokenizer", type=number(16, 10**7), metavar="SIZE",
        help="train a tokenizer of so many pieces on the documents",
    )  # fmt: skip
    lm.add_argument(
        "--field", nargs="+", metavar="NAME",
        help="the key or column of the text ('text' by default); several for documents of several "
        "parts, such as: prompt answer, or instruction+input output, where two are lines of a part",
    )  # fmt: skip
    lm.add_argument(
        "--documents", choices=("blank_line", "line", "file"),
        help="what ends a document of a text file; blank_line by default",
    )  # fmt: skip
    lm.add_argument(
        "--sentences", action="store_true", default=None,
        help="lines are sentences, which next-sentence prediction needs",
    )  # fmt: skip
    lm.add_argument(
        "--shard-tokens", type=number(1, 2**40), help="tokens of a shard; 2^28 by default"
    )


def prepare(arguments: argparse.Namespace) -> None:
    """Write what the options say, and print where it is.

    Raises:
        InputError: an option, or a file, is wrong.
    """
    out, overwrite = arguments.out, arguments.overwrite
    if arguments.lm:
        return _token_shards(arguments)
    for name in _OF_LM:
        if getattr(arguments, name) is not None:
            raise InputError(
                f"--{name.replace('_', '-')} goes with --lm only: add it, or leave it out"
            )
    if arguments.embedded:
        from dtransformer.datasets.embedded import write_corpus

        numbers = {"num_train": arguments.num_train, "seed": arguments.seed}
        paths = write_corpus(out, **numbers, overwrite=overwrite).values()
    else:
        from dtransformer.datasets import wmt14

        source = (
            wmt14.download(out, overwrite=overwrite) if arguments.download else arguments.source
        )
        paths = wmt14.prepare(source, out, overwrite)
    for path in paths:
        print(path)
    return None


def _token_shards(arguments):
    from dtransformer.datasets import (
        SubwordTokenizer,
        load_tokenizer,
        read_documents,
        write_token_shards,
    )
    from dtransformer.datasets.sample import evenly_spread, texts_of

    if not arguments.input:
        raise InputError("--lm needs --input: give files with text")
    options = {
        "field": arguments.field or "text",
        "boundary": arguments.documents or "blank_line",
        "sentences": bool(arguments.sentences),
    }
    if len(options["field"]) == 1:
        (options["field"],) = options["field"]
    documents = lambda: read_documents(arguments.input, **options)
    if arguments.tokenizer:
        tokenizer = load_tokenizer(arguments.tokenizer)
    elif arguments.train_tokenizer:
        tokenizer = SubwordTokenizer.train(
            evenly_spread(texts_of(documents())), arguments.train_tokenizer
        )
    else:
        raise InputError(
            "--lm needs a tokenizer: give --tokenizer FOLDER or --train-tokenizer SIZE"
        )
    size = {"shard_tokens": arguments.shard_tokens} if arguments.shard_tokens else {}
    shards = write_token_shards(
        documents(), tokenizer, arguments.out, overwrite=arguments.overwrite, **size
    )
    left_out = f"; {shards.num_left_out:,} with an empty part, or none, are left out" * bool(
        shards.num_left_out
    )
    print(
        f"{arguments.out}: {shards.num_tokens:,} tokens in {shards.num_documents:,} documents, "
        f"{len(shards.shard_sizes)} shards{left_out}"
    )
