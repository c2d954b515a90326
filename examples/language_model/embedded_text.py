"""Write the embedded corpus as English paragraphs, each with sentences about one topic.

    python examples/language_model/embedded_text.py --out data/lm

The files train.txt and dev.txt have one sentence per line and a blank line after each paragraph, the
format of `dtransformer prepare --lm`.
"""

import argparse
import collections
import pathlib

from dtransformer.datasets.embedded import sentence_pairs


def paragraphs(sentences, size=8):
    """Return lists of sentences with the same rarest word."""
    words = [[word.strip(".?!") for word in sentence.split()] for sentence in sentences]
    counts = collections.Counter(word for sentence in words for word in set(sentence))
    waiting, finished = collections.defaultdict(list), []
    for sentence, sentence_words in zip(sentences, words, strict=True):
        topic = min(sentence_words, key=lambda word: (counts[word], word))
        waiting[topic].append(sentence)
        if len(waiting[topic]) == size:
            finished.append(waiting.pop(topic))
    return finished + [rest for rest in waiting.values() if len(rest) > 1]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="data/lm")
    parser.add_argument("--sentences", type=int, default=40_000)
    args = parser.parse_args()
    english = [english for english, _ in sentence_pairs(args.sentences)]
    held_out = len(english) // 20
    folder = pathlib.Path(args.out)
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("dev", english[:held_out]), ("train", english[held_out:])):
        texts = ("\n".join(paragraph) for paragraph in paragraphs(part))
        (folder / f"{name}.txt").write_text("\n\n".join(texts) + "\n", encoding="utf-8")
        print(folder / f"{name}.txt")


if __name__ == "__main__":
    main()
