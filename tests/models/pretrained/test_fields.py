"""Promise: each field of a published file is taken, says nothing, or is named in one line."""

import json
import shutil

import numpy as np
import pytest

from dtransformer.errors import InputError
from dtransformer.models import CausalLM, EncoderDecoderLM, from_preset, from_pretrained
from dtransformer.models.generation import rules as generation_rules
from dtransformer.models.generation.rules import options_of
from dtransformer.models.pretrained.families import FAMILIES
from dtransformer.models.pretrained.load import KNOWN, SILENT, ReadFields, network_arguments
from tests.models.pretrained.family_rows import DEFAULT_SIZES
from tests.models.pretrained.published import NEW_TOKENS, published, results, with_transformers
from tests.models.pretrained.search_cases import FOLDER_RULES
from tests.models.pretrained.test_wrong_folders import BART, LLAMA, change_config, saved


def fields():
    return json.loads((published() / "fields.json").read_text())


@with_transformers
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("error")
def test_each_field_of_a_config_is_known(family):
    """And one that lacks means what it does there, or is an error."""
    usual = {**fields()["configs"][family], "decoder_start_token_id": 2}
    usual |= {x: 300_000 for x in ("vocab_size", "decoder_vocab_size") if x in usual}
    usual |= {x: 0.0 for x in usual if x.endswith("layerdrop")}  # which is named
    config = ReadFields(usual)
    FAMILIES[family].arguments(config)
    assert not usual.keys() - config.read - KNOWN - set(FAMILIES[family].special_ids.values())
    expected = network_arguments(FAMILIES[family], usual, "config.json")
    for name in usual:
        try:
            lacking = {key: value for key, value in usual.items() if key != name}
            found = network_arguments(FAMILIES[family], lacking, "config.json")
        except InputError as error:
            assert "lacks the field" in str(error)
        else:
            assert found == expected, name


@with_transformers
@pytest.mark.parametrize("family", DEFAULT_SIZES)
def test_default_configs_of_published_sizes_have_as_many_parameters(family):
    """Counted there on the device `meta`: nothing is made."""
    assert from_preset(DEFAULT_SIZES[family]).num_parameters() == fields()["parameters"][family]


@with_transformers
def test_each_field_of_a_generation_config_is_known():
    known = generation_rules.SILENT | generation_rules.TAKEN | generation_rules.NAMED
    assert not set(fields()["generation"]) - known


@pytest.fixture
def llama(tmp_path):
    return saved(CausalLM(20, **LLAMA), tmp_path, "llama")


def test_fields_that_are_not_taken_are_named(llama):
    for given, told in (
        ({"activation_dropout": 0.1}, "activation_dropout=0.1: not applied where the network is"),
        ({"of_tomorrow": 3}, "not known here, and ignored: of_tomorrow=3"),
    ):
        change_config(llama, **given)
        with pytest.warns(UserWarning, match=told):
            from_pretrained(llama)
        change_config(llama, **dict.fromkeys(given, KeyError))
    for given, told in (
        ({"quantization_config": {"bits": 4}}, "quantization_config=.* is not built"),
        ({"layer_types": ["sliding_attention"]}, "layer_types has 'sliding_attention'"),
    ):
        change_config(llama, **given)
        with pytest.raises(InputError, match=told):
            from_pretrained(llama)
        change_config(llama, **dict.fromkeys(given, KeyError))


def with_rules(folder, **rules):
    (folder / "generation_config.json").write_text(json.dumps(rules))
    return from_pretrained(folder)


@pytest.mark.filterwarnings("error")
def test_how_to_search_is_named_once(llama):
    asked = {"do_sample": True, "temperature": 0.6, "typical_p": 0.5, "max_length": 99}
    network = with_rules(llama, **asked)
    told = "not taken by itself are do_sample=True, temperature=0.6, typical_p=0.5, max_length=99"
    with pytest.warns(
        UserWarning, match=f"generation_config.json: {told}; temperature, the length"
    ):
        assert options_of(network, {}, 1).temperature == 0
    options_of(network, {}, 1)
    network = with_rules(llama, do_sample=True, temperature=0.6, top_p=0.9)
    assert options_of(network, {"temperature": 1.0, "top_p": 0.5}, 1).top_p == 0.5
    usual = {"temperature": 0.6, "early_stopping": True, "top_k": 50, "max_length": 20}
    options_of(with_rules(llama, **usual), {}, 1)
    with pytest.warns(UserWarning, match=r"forced_bos_token_id=4, bad_words_ids=\[\[5, 6\]\]"):
        options_of(with_rules(llama, forced_bos_token_id=4, bad_words_ids=[[5, 6]]), {}, 1)
    for rules, told in (
        ({"suppress_tokens": [20]}, r"suppress_tokens is \[20\], expected ids of the vocabulary"),
        ({"min_length": "3"}, "min_length is '3', expected an int"),
    ):
        with pytest.raises(InputError, match=told):
            with_rules(llama, **rules)


def test_rules_of_a_language_model(llama):
    """Lengths count the prompt where they say so; all ends end; configs keep it."""
    network = with_rules(llama, eos_token_id=[*range(3, 20)], min_length=6, suppress_tokens=[4])
    found = network.generate([[5, 6]], 9, seed=1, temperature=1.0).numpy()
    assert found.shape[1] >= 5 and 4 not in found and (found[0, :4] < 3).all()
    for one in (network, CausalLM.from_config(network.get_config())):
        assert options_of(one, {}, 2).min_new_tokens == 4
        assert options_of(one, {"min_new_tokens": 0}, 2).stop_ids == tuple(range(3, 20))
    (llama / "generation_config.json").unlink()
    change_config(llama, eos_token_id=[*range(3, 20)], min_length=6)  # as older folders have it
    assert from_pretrained(llama).generation_rules["min_length"] == 6


@with_transformers
@pytest.mark.parametrize("beams", [pytest.param(1, marks=pytest.mark.long), 3])
def test_rules_of_a_translation_model(beams, tmp_path):
    shutil.copytree(published() / "bart", tmp_path / "bart")
    network, expected = (
        with_rules(tmp_path / "bart", eos_token_id=2, **FOLDER_RULES),
        results("bart"),
    )
    source = expected["generate/source"].astype("int32")
    found = network.generate(source, NEW_TOKENS, beam_size=beams, length_penalty=0.0).numpy()
    np.testing.assert_array_equal(found, expected[f"ruled_generated_{beams}"])


def test_start_tokens_may_lack_in_the_config_alone(tmp_path):
    folder = saved(EncoderDecoderLM(20, **BART), tmp_path, "bart")
    change_config(folder, decoder_start_token_id=KeyError)
    with pytest.raises(InputError, match="lacks the field decoder_start_token_id"):
        from_pretrained(folder)
    assert "decoder_start_token_id" in SILENT
