"""Published tokenizers give the ids of their original libraries, and wrong files a one-line error."""

import json

import numpy as np
import pytest
import sentencepiece
import tensorflow as tf
import tokenizers

from dtransformer.datasets import SubwordTokenizer, load_tokenizer
from dtransformer.errors import InputError

TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "L'été dure 30 jours, ça va ?",
    "こんにちは 世界",
    "  two  spaces\nand a line",
    "",
]
END = "<|endoftext|>"


def write(folder, **files):
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


@pytest.fixture
def gpt2(tmp_path):
    """Byte-level BPE with one token for start, end and padding."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=[END, "<extra>"], initial_alphabet=alphabet
    )
    bpe.train_from_iterator(TEXTS, trainer)
    bpe.enable_padding(length=64)  # Some published files enable padding; loading disables it.
    bpe.save(str(tmp_path / "tokenizer.json"))
    return write(tmp_path, tokenizer_config={"bos_token": END, "eos_token": {"content": END}})


@pytest.fixture
def llama(tmp_path):
    """SentencePiece model with bytes for unknown characters, whose texts have a start id."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 3),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=330,
        byte_fallback=True,
        model_type="bpe",
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (tmp_path / "tokenizer.vocab").unlink()
    return write(tmp_path, tokenizer_config={"tokenizer_class": "LlamaTokenizer"})


def test_json_tokenizers_match_transformers(gpt2):
    tokenizer = load_tokenizer(gpt2)
    original = tokenizers.Tokenizer.from_file(str(gpt2 / "tokenizer.json"))
    original.no_padding()
    ids = tokenizer.encode(TEXTS)
    assert isinstance(ids, tf.RaggedTensor) and ids.dtype == "int32"
    assert ids.to_list() == [original.encode(text).ids for text in TEXTS]
    flat, row_splits = tokenizer.encode_to_numpy(TEXTS)
    assert flat.dtype == np.int32 and row_splits[-1] == len(flat) and len(row_splits) == 6
    for value in (ids, ids.to_list(), ids.to_tensor(tokenizer.end_id)):
        assert tokenizer.decode(value) == TEXTS
    assert tokenizer.vocab_size == original.get_vocab_size() == 300
    assert tokenizer.encode([]).to_list() == []


def test_special_ids_follow_the_tokenizer_files(gpt2):
    tokenizer = load_tokenizer(gpt2)
    assert (tokenizer.start_id, tokenizer.end_id, tokenizer.pad_id) == (0, 0, None)
    assert tokenizer.stop_ids == (0,)
    assert tokenizer.decode([[0, 50, 0, 51], [50, 299, 999, -1]]) == tokenizer.decode(
        [[50], [50, 299]]
    )
    write(gpt2, generation_config={"eos_token_id": [0, 1]}, special_tokens_map={"pad_token": END})
    tokenizer = load_tokenizer(gpt2)
    assert tokenizer.stop_ids == (0, 1) and tokenizer.pad_id == 0
    assert tokenizer.decode([[50, 1, 51]]) == tokenizer.decode([[50]])


def test_special_ids_of_a_vocabulary_without_lower_case_letters(tmp_path):
    original = tokenizers.Tokenizer(
        tokenizers.models.BPE({x: i for i, x in enumerate("<>ACGT")}, [])
    )
    original.add_special_tokens(["<", ">"])
    original.post_processor = tokenizers.processors.TemplateProcessing(
        single="< $A >", special_tokens=[("<", 0), (">", 1)]
    )
    original.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(
        write(tmp_path, tokenizer_config={"bos_token": "<", "eos_token": ">"})
    )
    assert tokenizer.encode(["ACGT", ""], add_special_ids=True).to_list() == [
        [0, 2, 3, 4, 5, 1],
        [0, 1],
    ]


def test_sentencepiece_tokenizers_match_the_library(llama):
    tokenizer = load_tokenizer(llama)
    original = sentencepiece.SentencePieceProcessor(model_file=str(llama / "tokenizer.model"))
    ids = tokenizer.encode(TEXTS)
    assert ids.to_list() == original.encode(TEXTS)
    assert tokenizer.decode(ids) == original.decode(original.encode(TEXTS))
    assert (tokenizer.unk_id, tokenizer.start_id, tokenizer.end_id, tokenizer.pad_id) == (
        original.unk_id(), original.bos_id(), original.eos_id(), None,
    )  # fmt: skip
    assert tokenizer.vocab_size == original.vocab_size() and tokenizer.stop_ids == (
        original.eos_id(),
    )
    with_start = tokenizer.encode(["dog"], add_special_ids=True).to_list()
    assert with_start == [[original.bos_id(), *original.encode("dog")]]
    assert tokenizer.decode([[*with_start[0], original.eos_id(), 7], [9999]]) == ["dog", ""]


def test_config_overrides_added_ids_of_sentencepiece(llama):
    """T5 adds an end id. The config can override this."""
    for config, add in (
        ({"tokenizer_class": "T5TokenizerFast"}, (0, 1)),
        ({"add_eos_token": True, "add_bos_token": True}, (1, 1)),
        ({}, (0, 0)),
    ):
        tokenizer = load_tokenizer(write(llama, tokenizer_config=config))
        plain, ids = (tokenizer.encode(["dog"], x).to_list()[0] for x in (False, True))
        assert ids == add[0] * [tokenizer.start_id] + plain + add[1] * [tokenizer.end_id]


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_saved_copy_is_identical(kind, request, tmp_path):
    tokenizer = load_tokenizer(request.getfixturevalue(kind))
    tokenizer.save(tmp_path / "copy")
    again = load_tokenizer(tmp_path / "copy")
    assert again.encode(TEXTS, True).to_list() == tokenizer.encode(TEXTS, True).to_list()
    assert vars(again).keys() == vars(tokenizer).keys() and again.stop_ids == tokenizer.stop_ids


def test_subword_tokenizer_is_loaded(tmp_path):
    original = SubwordTokenizer.train(TEXTS, vocab_size=110)
    original.save(tmp_path)
    assert load_tokenizer(tmp_path).vocabulary == original.vocabulary


def refusal(folder):
    with pytest.raises(InputError) as caught:
        load_tokenizer(folder)
    text = str(caught.value)
    assert str(folder) in text and "\n" not in text
    return text


def test_folder_without_a_tokenizer_is_refused(tmp_path):
    assert "does not exist" in refusal(tmp_path / "none")
    (tmp_path / "vocab.json").write_text("{}")
    assert "Expected tokenizer.json or tokenizer.model" in refusal(tmp_path)


@pytest.mark.parametrize(
    "content, expected_error",
    [
        ("{}", "is not a valid file of the library"),
        ("[1", "is damaged"),
        ('{"model": {"type": "Magic"}, "version": "1.0"}', "is not a valid file of the library"),
        ("\xff", "is damaged"),
        (
            json.dumps({"model": {"type": "WordLevel", "vocab": {"a": 2**31}, "unk_token": "a"}}),
            "Expected ids of at most 2,147,483,646, got 2,147,483,648",
        ),
    ],
)
def test_invalid_tokenizer_json_is_refused(tmp_path, content, expected_error):
    (tmp_path / "tokenizer.json").write_text(content)
    assert expected_error in refusal(tmp_path)


def test_invalid_sentencepiece_model_is_refused(llama):
    data = (llama / "tokenizer.model").read_bytes()
    for wrong in (b"", b"hello", data[:500], b"\x00" * 100, data[1:], b"\xff" * 50):
        (llama / "tokenizer.model").write_bytes(wrong)
        assert "is not a SentencePiece model" in refusal(llama)


@pytest.mark.parametrize(
    "files, expected_error",
    [
        ({"tokenizer_config": []}, "must contain a JSON object"),
        (
            {"tokenizer_config": {"eos_token": ["</s>"]}},
            "`eos_token` is ['</s>'], which the tokenizer",
        ),
        (
            {"tokenizer_config": {"eos_token": "<eot>"}},
            "`eos_token` is '<eot>', which the tokenizer",
        ),
        (
            {"tokenizer_config": {"tokenizer_class": "CamembertTokenizer"}},
            "Put the model's tokenizer.json",
        ),
        ({"generation_config": {"eos_token_id": "2"}}, "`eos_token_id` must be an id or a list"),
    ],
)
def test_mismatched_files_in_the_folder_are_refused(llama, files, expected_error):
    assert expected_error in refusal(write(llama, **files))


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_single_string_is_refused(kind, request):
    with pytest.raises(InputError, match="Put the string into a list"):
        load_tokenizer(request.getfixturevalue(kind)).encode("text")


@pytest.mark.parametrize("legacy", [False, True])
def test_special_tokens_in_sentencepiece_prompts_match_transformers(legacy, llama):
    transformers = pytest.importorskip("transformers")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS * 3),
        model_prefix=str(llama / "tokenizer"),
        vocab_size=330,
        byte_fallback=True,
        model_type="bpe",
        hard_vocab_limit=False,
        minloglevel=2,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        control_symbols=["<|user|>"],
    )
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    config = {"tokenizer_class": "LlamaTokenizer", "legacy": legacy, **special}
    tokenizer = load_tokenizer(write(llama, tokenizer_config=config))
    expected = transformers.AutoTokenizer.from_pretrained(llama)
    texts = [
        "<s>[INST] the fox [/INST] dog</s><s>[INST] lazy [/INST]",
        "<|user|>the dog</s>",
        "the <s> dog",
        "<s>",
        "the lazy dog",
        "</s></s> dog<unk>",
    ]
    ids = tokenizer.encode_prompts(texts).to_list()
    start = [tokenizer.start_id]
    for row, text in zip(ids, texts, strict=True):
        expected_row = expected.encode(text, add_special_tokens=False)
        assert row == (expected_row if expected_row[:1] == start else start + expected_row)
