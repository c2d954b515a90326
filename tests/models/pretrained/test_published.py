"""Published models compute, train, generate and are saved as in `transformers`."""

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
    MODEL_FAMILIES,
    NEW_TOKENS,
    PAIRS,
    PROMPTS,
    TEXTS,
    check,
    errors,
    generated_texts,
    get_batch,
    published,
    results,
    with_transformers,
)
from tests.models.pretrained.search_cases import RULES, SEARCHED, SEARCHES
from tests.on_mesh import on_mesh, start

pytestmark = with_transformers
# The quick suite has similar models of the same families.
LONG_NAMES = "llama_3", "mistral", "bert", "t5", *ROWS

# Together these families cover every variant of the blocks.
GENERATED = "gemma2", "olmo3", "glm4_moe"


def parametrize_names(names, quick=()):
    """Parametrize a test by `name`. Names in `LONG_NAMES` but not in `quick` are long tests."""
    long = lambda name: [pytest.mark.long] * (name in LONG_NAMES and name not in quick)
    return pytest.mark.parametrize("name", [pytest.param(name, marks=long(name)) for name in names])


def load_tensors(folder):
    """Return the tensors of all files in a folder."""
    files = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    return {name: array for file in files for name, array in file.items()}


@pytest.mark.parametrize("name", MODEL_FAMILIES)
def test_logits_match_transformers(name):
    network, expected = loaded(name), results(name)
    inputs, _ = get_batch(expected)
    assert max(errors(network(inputs), expected).values()) < 1e-5


@pytest.mark.parametrize("name", MODEL_FAMILIES)
def test_hf_input_names_and_left_padding_match_transformers(name):
    """The mask marks the padding, so the id of the padding does not matter."""
    network, expected = loaded(name), results(name)
    inputs = {
        key.removeprefix("padded/"): value.astype("int32")
        for key, value in expected.items()
        if key.startswith("padded/")
    }
    output = network(inputs)
    output = np.asarray(output["masked_lm"] if isinstance(output, dict) else output)
    mask = inputs.get("decoder_attention_mask", inputs["attention_mask"]) > 0
    reference = expected["padded"][mask]
    assert (
        np.abs(output[mask][:, : reference.shape[-1]] - reference).max() / np.abs(reference).max()
        < 1e-5
    )


@parametrize_names(TEXTS, GENERATED)
def test_generated_texts_match_transformers(name):
    """Prompts have different lengths, and texts are longer than windows and learned positions."""
    network, expected = from_pretrained(published() / name), generated_texts(name)
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
def test_searches_match_transformers(search):
    network, expected, options = loaded(SEARCHED), generated_texts(SEARCHED), SEARCHES[search]
    actual = network.generate(PROMPTS, NEW_TOKENS, length_penalty=0.0, **options).numpy()
    actual = actual.reshape([len(PROMPTS), -1, actual.shape[-1]])
    stop_ids = options.get("stop_ids", [END])
    for index in range(len(PROMPTS)):
        reference = expected[f"{search}_{index}"]
        assert [until(stop_ids, x) for x in actual[index]] == [
            until(stop_ids, x) for x in reference
        ]


@functools.cache
def loaded(name):
    return from_pretrained(published() / name)


def until(stop_ids, ids):
    """Return the ids up to and including the first stop id."""
    ends = [i for i, token in enumerate(ids) if token in stop_ids]
    return list(ids[: ends[0] + 1] if ends else ids)


@pytest.mark.parametrize("name", RULES)
def test_logits_rules_match_transformers(name):
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


@parametrize_names(PAIRS)
def test_translations_match_transformers(name):
    network, expected = from_pretrained(published() / name), generated_texts(name)
    source = expected["generate/source"].astype("int32")
    options = {"max_length": NEW_TOKENS, "length_penalty": 0.0}
    greedy = network.generate(source, **options).numpy()
    np.testing.assert_array_equal(greedy, expected["generated_1"])
    beams = network.generate(source, beam_size=3, **options).numpy()
    np.testing.assert_array_equal(beams, expected["generated_3"])


@parametrize_names(MODEL_FAMILIES, ("gemma2", "qwen3_moe"))
def test_training_steps_match_transformers(name):
    network, expected = from_pretrained(published() / name), results(name)
    if name in ("glm4_moe", "deepseek_v3"):  # `transformers` does not train the router's bias.
        freeze(network, "*/router/bias")
    trainer = Trainer(network)
    batch = get_batch(expected)
    loss = keras.tree.map_structure(lambda _: CrossEntropyLoss(ignore_id=-100), batch[1])
    trainer.compile(keras.optimizers.SGD(float(expected["learning_rate"])), loss)
    step = lambda: trainer.train_on_batch(*batch, return_dict=True)
    losses = [float(step()["loss"]) for _ in range(3)]
    np.testing.assert_allclose(losses, expected["losses"], rtol=1e-4)
    after = from_pretrained(published() / f"{name}_after")
    for weight, reference in zip(network.weights, after.weights, strict=True):
        scale = np.abs(reference.numpy()).max()
        np.testing.assert_allclose(weight.numpy(), reference.numpy(), rtol=0, atol=1e-4 * scale)


# Together these families cover every kind of file.
SAVED = "gpt2", "mixtral", "bert_sentences", "bart", "t5_gated", "glm4_moe"


@pytest.mark.parametrize(
    "names",
    [SAVED, pytest.param(tuple(MODEL_FAMILIES), marks=pytest.mark.long)],
    ids=["some families", "all families"],
)
def test_saved_models_equal_loaded_models_and_load_in_transformers(names, tmp_path):
    for name in names:
        family = MODEL_FAMILIES[name]
        save_pretrained(from_pretrained(published() / name), tmp_path / name, family)
        actual, expected = load_tensors(tmp_path / name), load_tensors(published() / name)
        is_optional = lambda key, kind=FAMILIES[family]: kind.is_optional(kind.canonical_name(key))
        assert actual.keys() == {key for key in expected if key in actual or not is_optional(key)}
        for key, array in actual.items():
            np.testing.assert_array_equal(expected[key], array)
        reloaded = from_pretrained(tmp_path / name)
        original = from_pretrained(published() / name)
        assert reloaded.arguments == original.arguments
        assert reloaded.generation_rules == original.generation_rules
    check(tmp_path)


@pytest.mark.parametrize("name", ROWS)
def test_unsupported_fields_of_a_family_raise_an_error(name, tmp_path):
    fields, message = ROWS[name].unsupported
    shutil.copytree(published() / name, tmp_path / name)
    path = tmp_path / name / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(InputError, match=message):
        from_pretrained(path.parent)


@on_mesh
def test_models_loaded_onto_a_mesh_match_transformers():
    start(model_parallel=2)
    for name in ("gpt2", "llama_tied", "qwen2", "bert_sentences", "marian"):
        network, expected = from_pretrained(published() / name), results(name)
        inputs, _ = get_batch(expected)  # The mesh pads the vocabulary of 61 entries.
        outputs = Trainer(network).predict(inputs, verbose=0)
        assert max(errors(outputs, expected).values()) < 1e-5
        if name in TEXTS:
            actual = network.generate(PROMPTS, max_new_tokens=NEW_TOKENS).numpy()
            np.testing.assert_array_equal(actual, generated_texts(name)["generated_1"])
        if name in PAIRS:
            source = generated_texts(name)["generate/source"].astype("int32")
            actual = network.generate(source, max_length=NEW_TOKENS).numpy()
            np.testing.assert_array_equal(actual, generated_texts(name)["generated_1"])


def test_arguments_override_the_config():
    network = from_pretrained(published() / "llama", dropout_rate=0.1, dtype="mixed_bfloat16")
    assert network.arguments["dropout_rate"] == 0.1
    assert network.compute_dtype == "bfloat16"


def test_older_rope_fields_give_the_same_arguments(tmp_path):
    """`transformers` 5 renamed the config fields of rotary positions."""
    for path in (published() / "llama_3").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    scaling = config.pop("rope_parameters")
    config |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
    (tmp_path / "config.json").write_text(json.dumps(config))
    older, newer = from_pretrained(tmp_path), from_pretrained(published() / "llama_3")
    assert older.arguments == newer.arguments
