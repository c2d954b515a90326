"""Every field of a published config is used, is known to have no effect, or is reported."""

import json
import shutil

import numpy as np
import pytest

from dtransformer.errors import InputError
from dtransformer.models import (
    CausalLM,
    EncoderDecoderLM,
    from_preset,
    from_pretrained,
    save_pretrained,
)
from dtransformer.models.generation import rules as generation_rules
from dtransformer.models.generation.rules import resolve_options
from dtransformer.models.pretrained.families import FAMILIES
from dtransformer.models.pretrained.load import (
    IGNORED_FIELDS,
    KNOWN_FIELDS,
    ReadFields,
    network_arguments,
)
from tests.models.pretrained.family_rows import DEFAULT_SIZES
from tests.models.pretrained.published import (
    NEW_TOKENS,
    generated_texts,
    published,
    with_transformers,
)
from tests.models.pretrained.search_cases import FOLDER_RULES
from tests.models.pretrained.test_wrong_folders import BART, LLAMA, change_config, save_network


def load_fields():
    return json.loads((published() / "fields.json").read_text())


@with_transformers
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("error")
def test_config_fields_are_known_and_missing_ones_take_hf_defaults(family):
    """A missing field has the default of `transformers`, or raises an error."""
    config_fields = {**load_fields()["configs"][family], "decoder_start_token_id": 2}
    config_fields |= {
        x: 300_000 for x in ("vocab_size", "decoder_vocab_size") if x in config_fields
    }
    # Other rates cause a warning.
    config_fields |= {x: 0.0 for x in config_fields if x.endswith("layerdrop")}
    config = ReadFields(config_fields)
    FAMILIES[family].from_hf(config)
    assert (
        not config_fields.keys()
        - config.read
        - KNOWN_FIELDS
        - set(FAMILIES[family].special_ids.values())
    )
    expected = network_arguments(FAMILIES[family], config_fields, "config.json")
    for name in config_fields:
        try:
            lacking = {key: value for key, value in config_fields.items() if key != name}
            actual = network_arguments(FAMILIES[family], lacking, "config.json")
        except InputError as error:
            assert "is missing" in str(error)
        else:
            assert actual == expected, name


@with_transformers
@pytest.mark.parametrize("family", DEFAULT_SIZES)
def test_parameter_counts_of_default_sizes_match_transformers(family):
    """`transformers` counted its parameters on the device `meta`, without values."""
    assert (
        from_preset(DEFAULT_SIZES[family]).num_parameters() == load_fields()["parameters"][family]
    )


@with_transformers
def test_all_generation_config_fields_are_known():
    known = (
        generation_rules.IGNORED_FIELDS
        | generation_rules.SUPPORTED_FIELDS
        | generation_rules.REPORTED_FIELDS
    )
    assert not set(load_fields()["generation"]) - known


@pytest.fixture
def llama(tmp_path):
    return save_network(CausalLM(20, **LLAMA), tmp_path, "llama")


def test_unsupported_fields_warn_or_raise_an_error(llama):
    for fields, message in (
        ({"activation_dropout": 0.1}, "Training ignores activation_dropout=0.1"),
        ({"of_tomorrow": 3}, "Ignored unknown fields of_tomorrow=3"),
    ):
        change_config(llama, **fields)
        with pytest.warns(UserWarning, match=message):
            from_pretrained(llama)
        change_config(llama, **dict.fromkeys(fields, KeyError))
    for fields, message in (
        ({"quantization_config": {"bits": 4}}, "`quantization_config=.*` is not supported"),
        ({"layer_types": ["sliding_attention"]}, "`layer_types` contains 'sliding_attention'"),
    ):
        change_config(llama, **fields)
        with pytest.raises(InputError, match=message):
            from_pretrained(llama)
        change_config(llama, **dict.fromkeys(fields, KeyError))


def load_with_rules(folder, **rules):
    (folder / "generation_config.json").write_text(json.dumps(rules))
    return from_pretrained(folder)


@pytest.mark.filterwarnings("error")
def test_ignored_generation_rules_warn_once(llama):
    rules = {"do_sample": True, "temperature": 0.6, "typical_p": 0.5, "max_length": 99}
    network = load_with_rules(llama, **rules)
    message = "`generate` ignores do_sample=True, temperature=0.6, typical_p=0.5, max_length=99"
    with pytest.warns(
        UserWarning, match=f"generation_config.json: {message}. Pass temperature, the length"
    ):
        assert resolve_options(network, {}, 1).temperature == 0
    resolve_options(network, {}, 1)
    network = load_with_rules(llama, do_sample=True, temperature=0.6, top_p=0.9)
    assert resolve_options(network, {"temperature": 1.0, "top_p": 0.5}, 1).top_p == 0.5
    silent_rules = {"temperature": 0.6, "early_stopping": True, "top_k": 50, "max_length": 20}
    resolve_options(load_with_rules(llama, **silent_rules), {}, 1)
    with pytest.warns(UserWarning, match=r"forced_bos_token_id=4, bad_words_ids=\[\[5, 6\]\]"):
        resolve_options(
            load_with_rules(llama, forced_bos_token_id=4, bad_words_ids=[[5, 6]]), {}, 1
        )
    for rules, message in (
        (
            {"suppress_tokens": [20]},
            r"`suppress_tokens` must have ids in the vocabulary .* got \[20\]",
        ),
        ({"min_length": "3"}, "`min_length` must be an integer .* got '3'"),
    ):
        with pytest.raises(InputError, match=message):
            load_with_rules(llama, **rules)


def test_generation_rules_of_a_language_model_apply(llama):
    """`min_length` counts the prompt, every end token ends a text, and configs keep the rules."""
    network = load_with_rules(
        llama, eos_token_id=[*range(3, 20)], min_length=6, suppress_tokens=[4]
    )
    actual = network.generate([[5, 6]], 9, seed=1, temperature=1.0).numpy()
    assert actual.shape[1] >= 5 and 4 not in actual and (actual[0, :4] < 3).all()
    for model in (network, CausalLM.from_config(network.get_config())):
        assert resolve_options(model, {}, 2).min_new_tokens == 4
        assert resolve_options(model, {"min_new_tokens": 0}, 2).stop_ids == tuple(range(3, 20))
    (llama / "generation_config.json").unlink()
    change_config(llama, eos_token_id=[*range(3, 20)], min_length=6)  # The form of older folders.
    assert from_pretrained(llama).generation_rules["min_length"] == 6


@with_transformers
@pytest.mark.parametrize("beams", [pytest.param(1, marks=pytest.mark.long), 3])
def test_generation_rules_of_a_translation_model_match_transformers(beams, tmp_path):
    shutil.copytree(published() / "bart", tmp_path / "bart")
    network, expected = (
        load_with_rules(tmp_path / "bart", eos_token_id=2, **FOLDER_RULES),
        generated_texts("bart"),
    )
    source = expected["generate/source"].astype("int32")
    actual = network.generate(source, NEW_TOKENS, beam_size=beams, length_penalty=0.0).numpy()
    np.testing.assert_array_equal(actual, expected[f"ruled_generated_{beams}"])


def test_missing_decoder_start_token_raises_an_error(tmp_path):
    folder = save_network(EncoderDecoderLM(20, **BART), tmp_path, "bart")
    change_config(folder, decoder_start_token_id=KeyError)
    with pytest.raises(InputError, match="`decoder_start_token_id` is missing"):
        from_pretrained(folder)
    assert "decoder_start_token_id" in IGNORED_FIELDS


def test_suppressed_ids_combine_all_fields(llama):
    for rules in (
        {"suppress_tokens": [4], "bad_words_ids": [[5], [6]]},
        {"bad_words_ids": [[5], [6]], "suppress_tokens": [4]},
    ):
        assert sorted(load_with_rules(llama, **rules).generation_rules["suppressed_ids"]) == [
            4,
            5,
            6,
        ]


def test_generation_rules_of_a_config_are_saved(llama, tmp_path):
    """Older folders have the rules in config.json. They are saved in generation_config.json."""
    rules = {"eos_token_id": [2, 3], "min_length": 6, "forced_eos_token_id": 2, "top_k": 7}
    change_config(llama, **rules, do_sample=True, suppress_tokens=[4])
    network = from_pretrained(llama)
    again = from_pretrained(save_pretrained(network, tmp_path / "saved"))
    assert again.end_id == network.end_id == 2
    asks = network.generation_rules["asks"][1]
    assert (
        again.generation_rules.pop("asks")[1]
        == asks
        == {"do_sample": [True, "temperature"]} | {"top_k": [7, "top_k"]}
    )
    assert again.generation_rules.items() <= network.generation_rules.items()
    saved = json.loads((tmp_path / "saved/generation_config.json").read_text())
    assert saved["eos_token_id"] == [2, 3] and saved["bos_token_id"] == network.start_id


def test_forced_first_token_of_a_config_is_saved(tmp_path):
    folder = save_network(EncoderDecoderLM(20, **BART), tmp_path, "bart")
    change_config(folder, forced_bos_token_id=5)
    network = from_pretrained(folder)
    assert network.generation_rules["first_ids"] == [5]
    save_pretrained(network, tmp_path / "new")
    saved = json.loads((tmp_path / "new/generation_config.json").read_text())
    assert saved["forced_bos_token_id"] == 5


@pytest.mark.parametrize("family", ["mistral", "seed_oss", "smollm3", "ernie4_5"])
def test_null_head_sizes_follow_from_other_fields(family):
    """Null means one key head per query head. A missing field has a default of the family."""
    sizes = {"vocab_size": 20, "hidden_size": 64, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 8, "num_hidden_layers": 1, "max_position_embeddings": 9}
    sizes |= {"eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
    for field, argument in (("num_key_value_heads", "num_kv_heads"), ("head_dim", "head_dim")):
        actual = network_arguments(FAMILIES[family], {**sizes, field: None}, "config.json")
        assert actual[argument] == {"num_kv_heads": 4, "head_dim": 16}[argument]
