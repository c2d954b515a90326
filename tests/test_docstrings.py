"""The examples in docstrings run and print the documented results."""

import doctest
import functools
import importlib
import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtransformer
from dtransformer.layers import CrossEntropyLoss
from dtransformer.models import CausalLM

ROOT = pathlib.Path(dtransformer.__file__).parent
# Names that examples may use in addition to the names of their module.
NAMES = {"dtransformer": dtransformer, "keras": keras, "np": np, "tf": tf}
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def modules_with_examples():
    """Return the names of all modules with examples."""
    paths = [path for path in ROOT.rglob("*.py") if ">>> " in path.read_text("utf-8")]
    names = [".".join(path.relative_to(ROOT.parent).with_suffix("").parts) for path in paths]
    return sorted(name.removesuffix(".__init__") for name in names)


@functools.cache
def trained_names():
    """Return a small trained trainer and its data, for examples of trainer methods."""
    texts = np.random.default_rng(0).integers(4, 50, (8, 6))
    inputs, labels = texts[:, :-1], texts[:, 1:]
    trainer = dtransformer.Trainer(CausalLM(50, hidden_size=8, num_heads=2, num_layers=1))
    trainer.compile(loss=CrossEntropyLoss(ignore_id=0))
    data = tf.data.Dataset.from_tensor_slices((inputs, labels)).batch(4)
    trainer.fit(data, verbose=0)
    return {"trainer": trainer, "data": data, "inputs": inputs}


@pytest.mark.parametrize("name", modules_with_examples())
def test_docstring_examples_pass(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runner, output = doctest.DocTestRunner(optionflags=FLAGS), []
    finder = doctest.DocTestFinder(exclude_empty=True)
    for test in finder.find(importlib.import_module(name), extraglobs=NAMES):
        assert "+SKIP" not in test.docstring, (
            f"{test.name}: remove '>>>' or make the example runnable"
        )
        source = "".join(example.source for example in test.examples)
        if "trainer." in source and "trainer =" not in source:
            test.globs = {**trained_names(), **test.globs}
        runner.run(test, out=output.append)
    assert runner.tries, f"{name} has '>>>' in its source, but no docstring with an example"
    assert not runner.failures, "".join(output)
