"""Train KerasHub's Llama with random weights and tensor parallelism.

    pip install keras-hub
    dtransformer launch -np 2 -- python examples/keras_hub_llama.py

The network is Llama 3.2 1B with widths and layers divided by SCALE.
"""

import dtransformer  # isort: skip  (before Keras, to configure TensorFlow)

import keras
import keras_hub
import numpy as np

SCALE = 16
dtransformer.init(dtransformer.TransformerOpParallelConfig(model_parallel=2))
backbone = keras_hub.models.Llama3Backbone(
    vocabulary_size=128_256 // SCALE,
    num_layers=max(16 // SCALE, 2),
    num_query_heads=32 // SCALE,
    num_key_value_heads=max(8 // SCALE, 2),
    hidden_dim=2048 // SCALE,
    intermediate_dim=8192 // SCALE,
    tie_word_embeddings=True,
)
tokens = np.random.default_rng(0).integers(1, backbone.vocabulary_size, (64, 33))
inputs = {"token_ids": tokens[:, :-1], "padding_mask": np.ones_like(tokens[:, :-1])}
symbols = {name: keras.Input((32,), dtype="int32", name=name) for name in inputs}
logits = backbone.token_embedding(backbone(symbols), reverse=True)
trainer = dtransformer.Trainer(keras.Model(symbols, logits))
trainer.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
trainer.fit(inputs, tokens[:, 1:], batch_size=16, epochs=2, verbose=2)

plan = trainer.plan()
total = sum(4 * np.prod(row.shape) for row in plan.rows)
if dtransformer.is_chief():
    print(f"Each device stores {plan.bytes_per_device / total:.1%} of {total:,} bytes of weights")
