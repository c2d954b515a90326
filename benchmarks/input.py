"""Measure the speed of tokenizing, batching, packing and token shards; print JSON.

    python benchmarks/input.py [--pairs SOURCE TARGET] [--rounds 5]

A GPU that trains 100,000 tokens per second needs 100,000 tokens per second without padding. The text is
the embedded corpus or two files with one sentence per line. Words and tokens count on both sides. The
benchmark uses all cores. Language models use the source side, which is written to token shards and
read in the order of an epoch.
"""

import argparse
import functools
import json
import os
import tempfile
import time

import paths  # noqa: F401

from dtransformer.datasets import (
    LanguageModelBatches,
    LengthBuckets,
    MaskedLanguageModelBatches,
    NextSentenceBatches,
    SpanCorruptionBatches,
    SubwordTokenizer,
    TranslationBatches,
    read_pairs,
    write_token_shards,
)
from dtransformer.datasets.embedded import sentence_pairs

TOKENS_PER_SECOND_OF_A_GPU = 100_000
BATCHES = {
    "buckets": {"batch_tokens": 4096},
    "one_shape_a_bucket": {"batch_tokens": 4096, "buckets": LengthBuckets(pad_to_bounds=True)},
    "packed": {"batch_tokens": 4096, "packed_length": 256},
}
LANGUAGE_MODEL_BATCHES = {
    "language_model": LanguageModelBatches,
    "masked_language_model": MaskedLanguageModelBatches,
    "next_sentences": NextSentenceBatches,
    "span_corruption": SpanCorruptionBatches,
}
SENTENCES_OF_A_DOCUMENT = 20


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", nargs=2, metavar="FILE")
    parser.add_argument("--num_pairs", type=int, default=30_000)
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


def main():
    args = parse_arguments()
    pairs = read_pairs(*args.pairs) if args.pairs else zip(*sentence_pairs(args.num_pairs))
    sides = [list(side)[: args.num_pairs] for side in pairs]
    tokenizer = SubwordTokenizer.train(sides[0] + sides[1], 8000 if args.pairs else 1200)
    words = sum(len(text.split()) for side in sides for text in side)
    ids = [tokenizer.encode(side) for side in sides]
    report = {"cores": len(os.sched_getaffinity(0)), "words": words}
    report["words_tokenized_per_second"] = [
        round(words / measure_seconds(lambda: [tokenizer.encode(side) for side in sides]))
        for _ in range(args.rounds)
    ]
    for name, options in BATCHES.items():
        batches = TranslationBatches(*ids, **options)
        count, places, seconds = 0, 0, []
        for epoch in range(args.rounds):
            batches.set_epoch(epoch)
            count = places = 0
            start = time.perf_counter()
            for inputs, labels in batches.as_dataset():
                count += int((inputs["source"].numpy() != 0).sum() + (labels.numpy() != 0).sum())
                places += inputs["source"].numpy().size + labels.numpy().size
            seconds.append(time.perf_counter() - start)
        report[name] = {
            "tokens_per_second": [round(count / each) for each in seconds],
            "times_the_need_of_a_gpu": round(
                count / sorted(seconds)[len(seconds) // 2] / TOKENS_PER_SECOND_OF_A_GPU, 1
            ),
            "share_that_counts": round(count / places, 3),
        }
    report.update(language_models(sides[0], tokenizer, args.rounds))
    print(json.dumps(report, indent=2))


def language_models(sentences, tokenizer, rounds):
    """Return the speed of writing token shards and of reading batches from them."""
    step = SENTENCES_OF_A_DOCUMENT
    documents = [sentences[i : i + step] for i in range(0, len(sentences), step)]
    words = sum(len(text.split()) for text in sentences)
    report = {}
    with tempfile.TemporaryDirectory() as folder:

        def write():
            return write_token_shards(documents, tokenizer, folder, overwrite=True)

        seconds = [measure_seconds(write) for _ in range(rounds)]
        report["words_written_per_second"] = [round(words / each) for each in seconds]
        shards = write()
        for name, kind in LANGUAGE_MODEL_BATCHES.items():
            batches = kind(shards, length=512, batch_size=16)
            seconds, count = [], len(batches) * 512 * 16
            for epoch in range(rounds):
                batches.set_epoch(epoch)
                seconds.append(measure_seconds(functools.partial(list, batches.as_dataset())))
            report[name] = {
                "tokens_per_second": [round(count / each) for each in seconds],
                "times_the_need_of_a_gpu": round(
                    count / sorted(seconds)[rounds // 2] / TOKENS_PER_SECOND_OF_A_GPU, 1
                ),
            }
    return report


def measure_seconds(function):
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
