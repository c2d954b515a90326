"""Contestant: KerasHub's layers, trained by Keras' `fit`, with XLA if the mode is `xla`."""

import keras
import tensorflow as tf
from fitted import fitted
from keras_hub.layers import TokenAndPositionEmbedding, TransformerDecoder, TransformerEncoder
from workloads import serve


def make_run(workload, mode):
    length, options = workload.length, {"dropout": 0.1, "normalize_first": True}
    sizes = workload.ffn_hidden_size, workload.num_heads
    source, target, labels = (
        None if ids is None else tf.constant(ids, "int32") for ids in workload.batch()
    )

    def embedded(ids):
        embedding = TokenAndPositionEmbedding(workload.vocab_size, length, workload.hidden_size)
        return keras.layers.Dropout(0.1)(embedding(ids))

    x = keras.Input((length,), dtype="int32", name="target")
    inputs, y = x, embedded(x)
    arguments = []
    if source is not None:
        ids = keras.Input((length,), dtype="int32", name="source")
        memory = embedded(ids)
        for _ in range(workload.encoder_layers):
            memory = TransformerEncoder(*sizes, **options)(memory)
        inputs, arguments = (
            {"source": ids, "target": x},
            [keras.layers.LayerNormalization()(memory)],
        )
    for _ in range(workload.decoder_layers):
        y = TransformerDecoder(*sizes, **options)(y, *arguments)
    y = keras.layers.LayerNormalization()(y)
    model = keras.Model(inputs, keras.layers.Dense(workload.vocab_size, use_bias=False)(y))
    model.compile(
        keras.optimizers.AdamW(1e-4),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=mode == "xla",
    )
    return fitted(model, target if source is None else {"source": source, "target": target}, labels)


if __name__ == "__main__":
    serve(make_run)
