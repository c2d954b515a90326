"""Promise: published models compute, learn and are saved here as `transformers` does it."""

import functools
import json
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf
from safetensors.numpy import load_file

from dtransformer.errors import InputError
from dtransformer.layers import CrossEntropyLoss
from dtransformer.models import freeze, from_pretrained, save_pretrained
from dtransformer.models.generation.logits_rules import (
    NEVER,
    min_p,
    no_repeated_ngrams,
    repetition_penalty,
    top_k,
    top_p,
)
from dtransformer.models.pretrained.families import FAMILIES
from dtransformer.trainers import Trainer
from tests.models.pretrained.family_rows import ROWS
from tests.models.pretrained.published import (
    END,
    FAMILY_OF,
    NEW_TOKENS,
    PAIRS,
    PROMPTS,
    TEXTS,
    check,
    errors,
    get_batch,
    published,
    results,
    with_transformers,
)
from tests.models.pretrained.search_cases import RULES, SEARCHED, SEARCHES
from tests.on_mesh import on_mesh, start

pytestmark = with_transformers
# Others of their families, which compute in nearly the same way, are in the quick suite.
TWINS = "llama_3", "mistral", "bert", "t5", *ROWS


# Of rows of families those that together have every new part of blocks are generated in the quick suite.
GENERATED = "gemma2", "olmo3", "glm4_moe"


def each_of(names, quick=()):
    """Parametrize a test by `name`; of families that have several names one is quick."""
    long = lambda name: [pytest.mark.long] * (name in TWINS and name not in quick)
    return pytest.mark.parametrize("name", [pytest.param(name, marks=long(name)) for name in names])


def tensors_of(folder):
    """Return all tensors of a folder, of one file or several."""
    files = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    return {name: array for file in files for name, array in file.items()}


@pytest.mark.parametrize("name", FAMILY_OF)
def test_logits(name):
    network, expected = loaded(name), results(name)
    inputs, _ = get_batch(expected)
    assert max(errors(network(inputs), expected).values()) < 1e-5


@pytest.mark.parametrize("name", FAMILY_OF)
def test_inputs_by_their_names_there(name):
    """Padding on the left, by whatever id, is what the mask says that it is."""
    network, expected = loaded(name), results(name)
    inputs = {
        key.removeprefix("padded/"): value.astype("int32")
        for key, value in expected.items()
        if key.startswith("padded/")
    }
    own = network(inputs)
    own = np.asarray(own["masked_lm"] if isinstance(own, dict) else own)
    mask = inputs.get("decoder_attention_mask", inputs["attention_mask"]) > 0
    theirs = expected["padded"][mask]
    assert np.abs(own[mask][:, : theirs.shape[-1]] - theirs).max() / np.abs(theirs).max() < 1e-5


@each_of(TEXTS, GENERATED)
def test_what_is_generated(name):
    """Prompts have different lengths; windows and learned positions end before the texts do."""
    network, expected = from_pretrained(published() / name), results(name)
    options = {"max_new_tokens": NEW_TOKENS, "length_penalty": 0.0}
    longest = max(map(len, PROMPTS))
    ids = np.array([[END] * (longest - len(row)) + row for row in PROMPTS])
    mask = np.array([[0] * (longest - len(row)) + [1] * len(row) for row in PROMPTS])
    with pytest.raises(
        ValueError, match="Prompt 0 begins with the end token 2, but other prompts do not"
    ):
        network.generate(ids, **options)
    if name == SEARCHED:
        padded = network.generate({"input_ids": ids, "attention_mask": mask}, **options)
        np.testing.assert_array_equal(padded, expected["generated_1"])
    greedy = network.generate(PROMPTS, **options).numpy()
    np.testing.assert_array_equal(greedy, expected["generated_1"])
    beams = network.generate(PROMPTS, beam_size=3, **options).numpy()
    np.testing.assert_array_equal(beams, expected["generated_3"])


@pytest.mark.parametrize("search", SEARCHES)
def test_what_each_search_finds(search):
    network, expected, options = loaded(SEARCHED), results(SEARCHED), SEARCHES[search]
    found = network.generate(PROMPTS, NEW_TOKENS, length_penalty=0.0, **options).numpy()
    found = found.reshape([len(PROMPTS), -1, found.shape[-1]])
    stop_ids = options.get("stop_ids", [END])
    for number in range(len(PROMPTS)):
        theirs = expected[f"{search}_{number}"]
        assert [until(stop_ids, x) for x in found[number]] == [until(stop_ids, x) for x in theirs]


@functools.cache
def loaded(name):
    return from_pretrained(published() / name)


def until(stop_ids, ids):
    """Return ids up to the first that ends a text."""
    places = [place for place, one in enumerate(ids) if one in stop_ids]
    return list(ids[: places[0] + 1] if places else ids)


@pytest.mark.parametrize("name", RULES)
def test_rules_of_logits(name):
    saved = results("rules")
    logits, texts = tf.constant(saved["logits"]), tf.constant(saved["texts"], "int32")
    rule = {
        "RepetitionPenaltyLogitsProcessor": lambda x: repetition_penalty(logits, texts, x),
        "NoRepeatNGramLogitsProcessor": lambda x: no_repeated_ngrams(logits, texts, x, 12),
        "TopKLogitsWarper": lambda x: top_k(logits, x),
        "TopPLogitsWarper": lambda x: top_p(logits, x),
        "MinPLogitsWarper": lambda x: min_p(logits, x),
    }[name]
    for value in RULES[name]:
        expected = np.maximum(saved[f"{name}_{value}"], NEVER)
        np.testing.assert_allclose(rule(value), expected, rtol=1e-6)
        assert (expected != saved["logits"]).any()


@each_of(PAIRS)
def test_what_is_translated(name):
    network, expected = from_pretrained(published() / name), results(name)
    source = expected["generate/source"].astype("int32")
    options = {"max_length": NEW_TOKENS, "length_penalty": 0.0}
    greedy = network.generate(source, **options).numpy()
    np.testing.assert_array_equal(greedy, expected["generated_1"])
    beams = network.generate(source, beam_size=3, **options).numpy()
    np.testing.assert_array_equal(beams, expected["generated_3"])


@each_of(FAMILY_OF, ("gemma2", "qwen3_moe"))
def test_three_steps_of_training(name):
    network, expected = from_pretrained(published() / name), results(name)
    if name in ("glm4_moe", "deepseek_v3"):  # the router's bias is not trained there
        freeze(network, "*/router/bias")
    trainer = Trainer(network)
    batch = get_batch(expected)
    loss = keras.tree.map_structure(lambda _: CrossEntropyLoss(ignore_id=-100), batch[1])
    trainer.compile(keras.optimizers.SGD(float(expected["learning_rate"])), loss)
    step = lambda: trainer.train_on_batch(*batch, return_dict=True)
    losses = [float(step()["loss"]) for _ in range(3)]
    np.testing.assert_allclose(losses, expected["losses"], rtol=1e-4)
    after = from_pretrained(published() / f"{name}_after")
    for own, theirs in zip(network.weights, after.weights, strict=True):
        scale = np.abs(theirs.numpy()).max()
        np.testing.assert_allclose(own.numpy(), theirs.numpy(), rtol=0, atol=1e-4 * scale)


# Families that together have every kind of file.
SAVED = "gpt2", "mixtral", "bert_sentences", "bart", "t5_gated", "glm4_moe"


@pytest.mark.parametrize(
    "names",
    [SAVED, pytest.param(tuple(FAMILY_OF), marks=pytest.mark.long)],
    ids=["some families", "all families"],
)
def test_what_is_saved_is_what_was_loaded_and_transformers_loads_it(names, tmp_path):
    for name in names:
        family = FAMILY_OF[name]
        save_pretrained(from_pretrained(published() / name), tmp_path / name, family)
        found, expected = tensors_of(tmp_path / name), tensors_of(published() / name)
        is_optional = lambda key, kind=FAMILIES[family]: kind.is_optional(kind.canonical_name(key))
        assert found.keys() == {key for key in expected if key in found or not is_optional(key)}
        for key, array in found.items():
            np.testing.assert_array_equal(expected[key], array)
        again = from_pretrained(tmp_path / name)
        first = from_pretrained(published() / name)
        assert again.arguments == first.arguments
        assert again.generation_rules == first.generation_rules
    check(tmp_path)


@pytest.mark.parametrize("name", ROWS)
def test_what_a_family_does_not_have_is_refused(name, tmp_path):
    fields, told = ROWS[name].refused
    shutil.copytree(published() / name, tmp_path / name)
    path = tmp_path / name / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(InputError, match=told):
        from_pretrained(path.parent)


@on_mesh
def test_straight_onto_a_mesh():
    start(model_parallel=2)
    for name in ("gpt2", "llama_tied", "qwen2", "bert_sentences", "marian"):
        network, expected = from_pretrained(published() / name), results(name)
        inputs, _ = get_batch(expected)  # of 61 entries: the vocabulary is padded
        outputs = Trainer(network).predict(inputs, verbose=0)
        assert max(errors(outputs, expected).values()) < 1e-5
        if name in TEXTS:
            found = network.generate(PROMPTS, max_new_tokens=NEW_TOKENS).numpy()
            np.testing.assert_array_equal(found, expected["generated_1"])
        if name in PAIRS:
            source = expected["generate/source"].astype("int32")
            found = network.generate(source, max_length=NEW_TOKENS).numpy()
            np.testing.assert_array_equal(found, expected["generated_1"])


def test_arguments_replace_those_of_the_config():
    network = from_pretrained(published() / "llama", dropout_rate=0.1, dtype="mixed_bfloat16")
    assert network.arguments["dropout_rate"] == 0.1
    assert network.compute_dtype == "bfloat16"


def test_an_older_config_says_the_same(tmp_path):
    """Before version 5 of `transformers` rotary positions had fields of another form."""
    for path in (published() / "llama_3").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    scaling = config.pop("rope_parameters")
    config |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
    (tmp_path / "config.json").write_text(json.dumps(config))
    older, newer = from_pretrained(tmp_path), from_pretrained(published() / "llama_3")
    assert older.arguments == newer.arguments
