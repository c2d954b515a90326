"""Training of a language model with a tied head, with the gradient norms of its layers."""

import keras
import numpy as np

from dtransformer.models import CausalLM
from dtransformer.trainers import Trainer

EPOCHS = 2
_VOCAB_SIZE = 48


def norms():
    """Return the gradient norms of two steps by log name."""
    network = CausalLM(_VOCAB_SIZE, hidden_size=16, num_heads=2, num_layers=4, dropout_rate=0.0)
    trainer = Trainer(network)
    trainer.compile(keras.optimizers.SGD(0.1, global_clipnorm=0.1), log_gradient_norms=True)
    ids = np.random.default_rng(0).integers(1, _VOCAB_SIZE, (8, 13))
    inputs, labels = ids[:, :-1], ids[:, 1:]
    options = {"batch_size": 8, "epochs": EPOCHS, "verbose": 0}
    history = trainer.fit(inputs, labels, **options).history
    return {name: values for name, values in history.items() if name.startswith("gradient_norm")}


TASKS = {"norms": norms}
