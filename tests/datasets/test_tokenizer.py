"""The subword tokenizer restores text exactly, and its training is exact and repeatable."""

import json
import string
import subprocess
import sys
import unicodedata

import numpy as np
import pytest
import tensorflow as tf
import tokenizers

from dtransformer.datasets import SubwordTokenizer, load_tokenizer, read_lines
from examples.wmt14 import preprocess
from tests.datasets.input_errors import get_error_message

SENTENCES = [
    "L'été dernier, j'ai vu l'Arc-de-Triomphe à 18\u00a0h\u00a030 !",
    "Qu'est-ce que c'est\u00a0? \u00ab\u202fRien\u202f\u00bb, dit-il…",
    "WMT14's files hold 3,003 pairs (20 % of them long).",
    "The children are playing in the garden; they don't see the rain.",
    "Les enfants jouent dans le jardin ; ils ne voient pas la pluie.",
]

TRICKY = [
    "",
    "a",
    "?",
    "Quoi ?",
    "Quoi\u00a0?",
    "\u00a0le\u00a0",
    "le\u00a0 jardin",
    "L'ÉTÉ, l'été",
    "30143, 3.14 and 18h30",
    "▁ ▁le le▁jardin ▂ ▂1 ▁▂2",
    "## ##le le## #",
    "[PAD] [UNK] [START] [END]",
    "e\u0301te\u0301",  # Combining accents are composed.
    "pluie" * 400,
    " runs \t of   white\nspace \r\n",
    "one\u2028line\u0085still",
]
# Characters of the tricky sentences that SENTENCES lack.
ALPHABET = " ".join([*string.ascii_letters, *string.digits, *"É▂#[]\u2028\u0085"])


def normal(text):
    """Normalize the permitted differences: NFC, and white space except no-break spaces."""
    for space in "\t\v\f\r\n":
        text = text.replace(space, " ")
    return " ".join(filter(None, unicodedata.normalize("NFC", text).split(" ")))


@pytest.fixture(scope="module")
def tokenizer():
    return SubwordTokenizer.train([*SENTENCES, ALPHABET], vocab_size=280)


@pytest.mark.parametrize("text", [*TRICKY, *SENTENCES])
def test_text_is_restored_exactly(tokenizer, text):
    ids = tokenizer.encode([text])
    assert tokenizer.unk_id not in ids.to_list()[0]
    assert tokenizer.decode(ids) == [normal(text)]


def test_all_characters_are_restored_at_all_positions(tokenizer):
    known = sorted({c for text in [*SENTENCES, ALPHABET] for c in text} - {" "})
    places = [p.format(c) for c in known for p in ("{}", "a{}", "{}a", "a {}", "{} a", "1{0}{0}a")]
    assert tokenizer.decode(tokenizer.encode(places)) == [normal(text) for text in places]


@pytest.mark.parametrize(
    "text, comes_back",
    [
        ("le 猫 dort", "le ⁇ dort"),
        ("naж jardin", "na ⁇ jardin"),  # Only the character is lost, not its word.
        ("猫猫", "⁇ ⁇"),
        ("a\0b", "a ⁇ b"),
        ("\ufffd", "⁇"),
    ],
)
def test_unknown_characters_are_marked(tokenizer, text, comes_back):
    ids = tokenizer.encode([text])
    assert tokenizer.unk_id in ids.to_list()[0]
    assert tokenizer.decode(ids) == [comes_back]


def test_ids_are_ragged_int32(tokenizer):
    special = (tokenizer.pad_id, tokenizer.unk_id, tokenizer.start_id, tokenizer.end_id)
    assert special == (0, 1, 2, 3)
    ids = tokenizer.encode(SENTENCES)
    assert isinstance(ids, tf.RaggedTensor) and ids.dtype == tf.int32 and ids.ragged_rank == 1
    flat, row_splits = tokenizer.encode_to_numpy(SENTENCES)
    np.testing.assert_array_equal(flat, ids.flat_values)
    np.testing.assert_array_equal(row_splits, ids.row_splits)
    assert flat.min() > 3 and flat.max() < tokenizer.vocab_size
    assert tokenizer.encode([]).shape[0] == 0
    assert tokenizer.encode(["", " "]).to_list() == [[], []]


def test_order_is_kept_over_many_sentences(tokenizer):
    sentences = [f"{index} pairs" for index in range(20_000)]
    assert tokenizer.decode(tokenizer.encode(sentences)) == sentences


def test_decoding_stops_at_the_end_token_and_accepts_any_container(tokenizer):
    first, second = tokenizer.encode(SENTENCES[3:]).to_list()
    rows = [[2, *first, 3, 0, *second], [2, 0, *second, 3]]
    width = max(map(len, rows))
    dense = np.array([row + [0] * (width - len(row)) for row in rows])
    for ids in (rows, dense, tf.constant(dense, tf.int32), tf.ragged.constant(rows)):
        assert tokenizer.decode(ids) == SENTENCES[3:]
    assert tokenizer.decode([]) == [] and tokenizer.decode([[]]) == [""]
    assert tokenizer.decode([[280], [-1], [0, 2]]) == [""] * 3  # These ids have no text.
    assert "row" in get_error_message(tokenizer.decode, [4, 5])
    assert "list" in get_error_message(tokenizer.encode, "one string")


def test_stop_text_is_encoded_as_a_word(tokenizer):
    for text in (".", "l", "jardin"):
        assert [tokenizer.encode_stop(text)] == tokenizer.encode([text]).to_list()


def test_lower_case_folds_text_before_encoding():
    tokenizer = SubwordTokenizer.train(SENTENCES, 130, lower_case=True)
    assert tokenizer.decode(tokenizer.encode(["L'ÉTÉ DIT"])) == ["l'été dit"]
    assert not any(c.isupper() for piece in tokenizer.vocabulary[4:] for c in piece)


def test_training_is_exact_and_repeatable():
    script = (
        "import sys, json; from dtransformer.datasets import SubwordTokenizer;"
        "print(json.dumps(SubwordTokenizer.train(json.loads(sys.argv[1]), 150).vocabulary))"
    )
    here = list(SubwordTokenizer.train(SENTENCES, 150).vocabulary)
    assert len(here) == len(set(here)) == 150
    # Another process has other hashes, so this fails if the result depends on the order of sets.
    command = [sys.executable, "-c", script, json.dumps(SENTENCES)]
    there = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert json.loads(there.splitlines()[-1]) == here


def test_error_for_a_wrong_size_contains_a_valid_size():
    message = get_error_message(SubwordTokenizer.train, SENTENCES, 100_000)
    largest = int(message.rsplit("at most ", 1)[1].split()[0])
    assert SubwordTokenizer.train(SENTENCES, largest).vocab_size == largest
    assert "too large" in get_error_message(SubwordTokenizer.train, SENTENCES, largest + 1)
    message = get_error_message(SubwordTokenizer.train, SENTENCES, 50)
    smallest = int(message.split(" pieces")[0].rsplit(" ", 1)[1])
    assert SubwordTokenizer.train(SENTENCES, smallest).vocab_size == smallest
    assert SubwordTokenizer.train(SENTENCES, 52, max_characters=20).vocab_size == 52
    for empty in ([], ["", " \n"]):
        assert "text" in get_error_message(SubwordTokenizer.train, empty, 100)


def test_saved_tokenizer_gives_the_same_ids(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "run" / "tokenizer")
    loaded = SubwordTokenizer.load(tmp_path / "run" / "tokenizer")
    texts = [*SENTENCES, *TRICKY]
    assert loaded.vocabulary == tokenizer.vocabulary
    assert loaded.encode(texts).to_list() == tokenizer.encode(texts).to_list()


def test_folder_of_an_older_version_is_loaded(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    del content["decoder"]["decoders"][1]  # Older versions lack this step.
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "subword_tokenizer.json").write_text("{}")
    loaded = load_tokenizer(tmp_path)
    assert loaded.vocabulary == tokenizer.vocabulary
    assert loaded.decode(loaded.encode(["le 猫"])) == ["le ⁇"]


@pytest.mark.parametrize("lower_case", [False, True])
def test_other_libraries_load_the_saved_files(lower_case, tmp_path):
    """The ids and texts are equal, except that special pieces in texts become special tokens."""
    sentences = [*SENTENCES, ALPHABET]
    tokenizer = SubwordTokenizer.train(sentences, vocab_size=210, lower_case=lower_case)
    tokenizer.save(tmp_path)
    original = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    texts = [
        text
        for text in [*TRICKY, *SENTENCES, "\n\n a\n\nb \n", "猫 and 猫s"]
        if "[PAD]" not in text
    ]
    ids = tokenizer.encode(texts).to_list()
    assert [item.ids for item in original.encode_batch(texts)] == ids
    assert (
        original.decode_batch(ids)[:-1] == tokenizer.decode(ids)[:-1]
    )  # Unknown characters are left out.
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    special = [config[f"{name}_token"] for name in ("pad", "unk", "bos", "eos")]
    assert [original.token_to_id(piece) for piece in special] == [0, 1, 2, 3]
    assert isinstance(load_tokenizer(tmp_path), SubwordTokenizer)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_different_tokenizer_is_not_replaced(tokenizer, tmp_path, name):
    (tmp_path / name).write_text("{}")
    assert "other content" in get_error_message(tokenizer.save, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize(
    "damage, expected_error",
    [
        (None, "does not exist"),
        (lambda text: text[:-5], "not valid JSON"),
        (lambda text: "[]", "Copy the folder again"),
        (lambda text: text.replace('": 279', '": 280'), "its fields differ"),
        (lambda text: text.replace('": 279', '猫猫": 279'), "猫猫"),
        (lambda text: text.replace('": 279', '": "279"'), "its fields differ"),
        (lambda text: text.replace("[UNK]", "[OOV]"), "must begin with [PAD] [UNK]"),
        (lambda text: text.replace("NFC", "NFKC"), "its fields differ"),
        (lambda text: text.replace('"normalizers"', '"others"'), "normalizers"),
    ],
)
def test_damaged_tokenizer_is_refused(tokenizer, tmp_path, damage, expected_error):
    tokenizer.save(tmp_path)
    path = tmp_path / "tokenizer.json"
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage(path.read_bytes().decode()).encode())
    message = get_error_message(SubwordTokenizer.load, tmp_path)
    assert expected_error in message and str(tmp_path) in message


def test_real_sentences_are_restored(shared_data):
    lines = []
    for language in ("en", "fr"):
        lines += read_lines(shared_data / "tatoeba" / f"dev.{language}.gz")
    names = (shared_data / "wmt14" / name for name in (preprocess.ENGLISH, preprocess.FRENCH))
    for pair in preprocess.read_sgm_pairs(*names)[:500]:
        lines += pair
    tokenizer = SubwordTokenizer.train(lines, 4000)
    ids = tokenizer.encode(lines)
    assert tokenizer.decode(ids) == [normal(line) for line in lines]
    pieces, words = len(ids.flat_values), sum(len(line.split()) for line in lines)
    assert pieces < 2 * words  # Pieces are subwords, not characters.
