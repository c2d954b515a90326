"""Promise: `import dtransformer` is enough for `keras.saving.load_model`, before or after Keras'."""

import subprocess
import sys

import keras
import numpy as np

import dtransformer.layers
import dtransformer.models
import dtransformer.trainers
import dtransformer.trainers.lr_schedules
from dtransformer.registration import CLASSES

LOAD = """
import sys, dtransformer
assert "keras" not in sys.modules
import keras
print([keras.saving.load_model(path).count_params() for path in sys.argv[1:]])
"""


def test_all_registered_classes_are_known():
    registered = keras.saving.get_custom_objects().items()
    classes = {x for name, x in registered if name.startswith("dtransformer>")}
    assert {x.__name__ for x in classes if isinstance(x, type)} == set(CLASSES)


def test_files_are_loaded_in_a_new_process(tmp_path):
    ids = keras.Input((4,), dtype="int32")
    x = keras.layers.Embedding(6, 8, mask_zero=True)(ids)
    x = dtransformer.layers.TransformerEncoder(1, 8, 2, 16)(x)
    network = keras.Model(ids, dtransformer.layers.VocabHead(6)(x))
    causal = dtransformer.models.CausalLM(6, hidden_size=8, num_heads=2, num_layers=1)
    causal(np.ones((1, 4), "int32"))
    models = [dtransformer.trainers.Trainer(network), network, causal]
    paths = [tmp_path / f"{number}.keras" for number in range(3)]
    for model, path in zip(models, paths):
        model.build((None, 4))
        model.save(path)
    expected = [model.count_params() for model in models]
    command = [sys.executable, "-c", LOAD, *paths]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.split("\n")[0] == str(expected), done.stderr
