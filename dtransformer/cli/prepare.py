"""`dtransformer prepare`: write the files that training reads."""

import argparse

from dtransformer.errors import InputError

_CORPUS_OPTIONS = "num_train", "seed"
_LM_OPTIONS = (
    "input",
    "tokenizer",
    "train_tokenizer",
    "field",
    "documents",
    "sentences",
    "shard_tokens",
)


def prepare(arguments: argparse.Namespace) -> None:
    """Write the embedded corpus or token shards, and print their paths.

    Raises:
        InputError: If an option or a file is wrong.
    """
    unused, required = (_CORPUS_OPTIONS, "--embedded") if arguments.lm else (_LM_OPTIONS, "--lm")
    for name in unused:
        if getattr(arguments, name) is not None:
            raise InputError(f"--{name.replace('_', '-')} requires {required}. Remove it.")
    if arguments.lm:
        return _token_shards(arguments)
    from dtransformer.datasets.embedded import write_corpus

    options = {k: x for k in _CORPUS_OPTIONS if (x := getattr(arguments, k)) is not None}
    paths = write_corpus(arguments.out, **options, overwrite=arguments.overwrite)
    print(*paths.values(), sep="\n")
    return None


def _token_shards(arguments):
    from dtransformer import datasets
    from dtransformer.datasets.sample import iterate_texts, sample_evenly

    if not arguments.input:
        raise InputError("--lm requires --input. Add files with text.")
    options = {
        "field": arguments.field or "text",
        "boundary": arguments.documents or "blank_line",
        "sentences": bool(arguments.sentences),
    }

    def documents():
        return datasets.read_documents(arguments.input, **options)

    if arguments.tokenizer:
        tokenizer = datasets.load_tokenizer(arguments.tokenizer)
    elif arguments.train_tokenizer:
        tokenizer = datasets.train_byte_level(
            sample_evenly(iterate_texts(documents())), arguments.train_tokenizer
        )
    else:
        raise InputError(
            "--lm requires a tokenizer. Add --tokenizer FOLDER or --train-tokenizer SIZE."
        )
    size = {"shard_tokens": arguments.shard_tokens} if arguments.shard_tokens else {}
    shards = datasets.write_token_shards(
        documents(), tokenizer, arguments.out, overwrite=arguments.overwrite, **size
    )
    skipped = ""
    if shards.num_skipped:
        skipped = f"; skipped {shards.num_skipped:,} documents with an empty part or no text"
    print(
        f"{arguments.out}: {shards.num_tokens:,} tokens in {shards.num_documents:,} documents, "
        f"{len(shards.shard_sizes)} shards{skipped}"
    )
