"""Published tokenizers give the ids and texts of their original libraries for unusual strings."""

import json

import numpy as np
import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from dtransformer.datasets import load_tokenizer
from dtransformer.errors import InputError

PARTS = (
    *(
        "the",
        "Quick",
        "brown",
        "été",
        "naïve",
        "straße",
        "ﬁle",
        "ＡＢＣ",
        "x2",
        "3.14",
        "don't",
        "HELLO",
    ),
    *(" ", "  ", "\n", "\t", "\r\n", "\u00a0", "\u3000", "\u200b", "\ufeff", "\u2028", "▁", "##a"),
    *(
        "\x00",
        "\x01",
        "\x1f",
        "\x7f",
        "\x85",
        "\u0301",
        "e\u0301",
        "a\u0308\u0323",
        "\u202e",
        "\u200d",
    ),
    *(
        "👩‍👩‍👧‍👦",
        "🏳️‍🌈",
        "👍🏽",
        "🇫🇷",
        "こんにちは",
        "世界",
        "한국어",
        "ไทย",
        "हिन्दी",
        "مرحبا",
        "שלום",
        "𝔘𝔫𝔦",
    ),
    *(
        "<s>",
        "</s>",
        "<|im_start|>",
        "<unk>",
        "[CLS]",
        "[MASK]",
        "<extra>",
        "<0x41>",
        "�",
        "\U0010ffff",
    ),
    *("!", "?", "...", "—", "“", "(", ")", "{", "}", "\\", "/", "'", '"', "`", "_", "-", "#", "@"),
)
CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "L'été dure 30 jours, ça va ?",
    "世界 こんにちは",
] * 3
ADDED = "<|im_start|>", "<extra>", "[MASK]"


def draw_unusual_texts(index=2000, seed=0):
    """Return concatenations of unusual parts, random characters, and an empty text."""
    rng = np.random.default_rng(seed)
    texts = ["", " ", "\n"]
    while len(texts) < index - 200:
        texts.append("".join(rng.choice(PARTS, rng.integers(1, 9))))
    while len(texts) < index:
        codes = rng.choice([rng.integers(0, 0xD800), rng.integers(0xE000, 0x110000)], 6)
        texts.append("".join(map(chr, codes)))
    return texts


def byte_level_bpe():
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return tokenizer, trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=alphabet, special_tokens=["<s>"]
    )


def word_piece():
    tokenizer = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return tokenizer, trainers.WordPieceTrainer(
        vocab_size=120, special_tokens=["[PAD]", "[UNK]", "[CLS]"]
    )


def unigram():
    tokenizer = tokenizers.Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.Nmt(), normalizers.NFKC()])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    options = {"unk_token": "<unk>", "special_tokens": ["<s>", "</s>", "<unk>"]}
    return tokenizer, trainers.UnigramTrainer(vocab_size=100, **options)


def byte_fallback_bpe():
    tokenizer = tokenizers.Tokenizer(
        models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{x:02X}>" for x in range(256))]
    return tokenizer, trainers.BpeTrainer(vocab_size=400, special_tokens=pieces)


KINDS = byte_level_bpe, word_piece, unigram, byte_fallback_bpe


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_json_tokenizers_match_transformers(kind, tmp_path):
    """The reference is `transformers`, which returns the library's results unchanged."""
    transformers = pytest.importorskip("transformers")
    original, trainer = kind()
    original.train_from_iterator(CORPUS, trainer)
    original.add_tokens([tokenizers.AddedToken(ADDED[0], lstrip=True), ADDED[1]])
    original.add_special_tokens([tokenizers.AddedToken(ADDED[2], rstrip=True)])
    original.save(str(tmp_path / "tokenizer.json"))
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
    hf_tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    texts, tokenizer = draw_unusual_texts(), load_tokenizer(tmp_path)
    ids = hf_tokenizer(texts, add_special_tokens=False)["input_ids"]
    assert tokenizer.encode(texts).to_list() == ids
    assert tokenizer.decode(ids) == hf_tokenizer.batch_decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize(
    "model_type, rule", [("unigram", "nmt_nfkc"), ("bpe", "identity"), ("unigram", "no_prefix")]
)
def test_sentencepiece_tokenizers_match_the_library(model_type, rule, tmp_path):
    """The last case adds no space before a text, as Gemma does."""
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=400,
        hard_vocab_limit=False,
        user_defined_symbols=list(ADDED),
        normalization_rule_name="nmt_nfkc" if rule == "nmt_nfkc" else "identity",
        remove_extra_whitespaces=rule == "nmt_nfkc",
        add_dummy_prefix=rule != "no_prefix",
        minloglevel=2,
        model_type=model_type,
        byte_fallback=model_type == "bpe",
    )
    original = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    texts, tokenizer = draw_unusual_texts(), load_tokenizer(tmp_path)
    ids = original.encode(texts)
    assert tokenizer.encode(texts).to_list() == ids
    assert tokenizer.decode(ids) == original.decode(ids)


def test_added_tokens_missing_in_the_model_are_refused(tmp_path):
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=60,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    added = {"1": {"content": "<s>"}, "32000": {"content": "<|im_start|>"}}
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({"added_tokens_decoder": {"1": added["1"]}}))
    load_tokenizer(tmp_path)
    path.write_text(json.dumps({"added_tokens_decoder": added}))
    with pytest.raises(
        InputError, match=r"has '<\|im_start\|>', which is not in tokenizer.model. Put"
    ):
        load_tokenizer(tmp_path)
