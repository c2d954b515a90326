"""After `import dtransformer`, in any order with Keras, `load_model` knows all classes."""

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


def test_classes_lists_all_registered_classes():
    registered = keras.saving.get_custom_objects().items()
    classes = {cls for name, cls in registered if name.startswith("dtransformer>")}
    assert {cls.__name__ for cls in classes if isinstance(cls, type)} == set(CLASSES)


def test_saved_models_load_in_a_new_process(tmp_path):
    ids = keras.Input((4,), dtype="int32")
    x = keras.layers.Embedding(6, 8, mask_zero=True)(ids)
    x = dtransformer.layers.TransformerEncoder(1, 8, 2, 16)(x)
    network = keras.Model(ids, dtransformer.layers.VocabHead(6)(x))
    causal = dtransformer.models.CausalLM(6, hidden_size=8, num_heads=2, num_layers=1)
    causal(np.ones((1, 4), "int32"))
    models = [dtransformer.trainers.Trainer(network), network, causal]
    paths = [tmp_path / f"{i}.keras" for i in range(3)]
    for model, path in zip(models, paths):
        model.build((None, 4))
        model.save(path)
    expected = [model.count_params() for model in models]
    command = [sys.executable, "-c", LOAD, *paths]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.stdout.split("\n")[0] == str(expected), process.stderr
