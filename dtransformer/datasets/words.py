"""Text to words, in TensorFlow: every step can be undone by the tokenizer's `decode`."""

from collections.abc import Callable, Iterable, Iterator

import tensorflow as tf
import tensorflow_text as tf_text

from dtransformer.inputs.text import whole_texts

SPACE = "▁"  # U+2581, a space in front of the word
ESCAPE = "▂"  # U+2582; in the text itself "▁" becomes "▂1" and "▂" becomes "▂2"
ESCAPED_SPACE, ESCAPED_ESCAPE = ESCAPE + "1", ESCAPE + "2"

_WHITE_SPACE = r"[ \t\v\f\r\n]+"
WORD = rf"{SPACE}?[\p{{L}}\p{{M}}]+|{SPACE}?[^\p{{L}}\p{{M}}{SPACE}]"

_CHUNK_SIZE = 8192  # sentences of a call of a compiled function


def normalise(sentences: tf.Tensor, lower_case: bool) -> tf.Tensor:
    """Return strings [n] in Unicode NFC, with `SPACE` for runs of white space, and in front.

    Marks that stand in the text itself are escaped.
    """
    if lower_case:
        sentences = tf.strings.lower(sentences, encoding="utf-8")
    text = tf_text.normalize_utf8(sentences, "NFC")
    text = tf.strings.regex_replace(text, ESCAPE, ESCAPED_ESCAPE)
    text = tf.strings.regex_replace(text, SPACE, ESCAPED_SPACE)
    text = tf.strings.regex_replace(text, f"^{_WHITE_SPACE}|{_WHITE_SPACE}$", "")
    text = tf.strings.regex_replace(text, _WHITE_SPACE, SPACE)
    return tf.where(text == "", text, tf.strings.join([SPACE, text]))


def split_words(text: tf.Tensor) -> tf.RaggedTensor:
    """Return the words of normalised strings [n], strings [n, (words)]."""
    # No white space is left in the text, so that it can separate the words.
    return tf.strings.split(tf.strings.regex_replace(text, WORD, r"\0 "))


def map_chunks(function: Callable, sentences: Iterable[str]) -> Iterator:
    """Return an iterator of a compiled function's results, as arrays, for chunks of sentences.

    Args:
        function: a function of strings [n].
        sentences: the sentences.
    """
    sentences = tf.constant(whole_texts(sentences), dtype=tf.string)
    chunks = tf.data.Dataset.from_tensor_slices(sentences).batch(_CHUNK_SIZE)
    chunks = chunks.map(function, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    return chunks.as_numpy_iterator()


def unescape(text: str) -> str:
    """Return text with `SPACE` turned into spaces, and escaped marks into marks."""
    text = text.replace(SPACE, " ")
    return text.replace(ESCAPED_SPACE, SPACE).replace(ESCAPED_ESCAPE, ESCAPE)
