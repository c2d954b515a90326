"""Training speed beside KerasHub's layers with `fit`, step by step in turn.

The workload of single_process.py. All three contestants live in one process and train
a few steps each in turn, so that a machine whose speed drifts is the same for all.
Needs `pip install keras-hub`, which the project itself does not. Prints JSON.

    python benchmarks/against_keras_hub.py [--rounds 6] [--steps 4]
"""

import argparse
import json
import statistics

import keras
from keras_hub.layers import (
    TokenAndPositionEmbedding,
    TransformerDecoder,
    TransformerEncoder,
)
from single_process import (
    BATCH,
    FFN,
    HEADS,
    HIDDEN,
    LAYERS,
    LENGTH,
    VOCAB,
    Stopwatch,
    batches,
    make_trainer,
    seconds_of_products,
)


def keras_hub_model(jit_compile):
    source = keras.Input((LENGTH,), dtype="int32", name="source")
    target = keras.Input((LENGTH,), dtype="int32", name="target")
    options = {"dropout": 0.1, "activation": "relu", "normalize_first": True}
    x = TokenAndPositionEmbedding(VOCAB, LENGTH, HIDDEN)(source)
    for _ in range(LAYERS):
        x = TransformerEncoder(FFN, HEADS, **options)(x)
    y = TokenAndPositionEmbedding(VOCAB, LENGTH, HIDDEN)(target)
    for _ in range(LAYERS):
        y = TransformerDecoder(FFN, HEADS, **options)(y, x)
    logits = keras.layers.Dense(VOCAB, use_bias=False)(y)
    model = keras.Model({"source": source, "target": target}, logits)
    model.compile(
        keras.optimizers.AdamW(1e-4),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=jit_compile,
    )
    return model


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=4)
    arguments = parser.parse_args()
    contestants = {
        "dtransformer": make_trainer("auto", "float32"),
        "keras_hub": keras_hub_model(False),
        "keras_hub_xla": keras_hub_model(True),
    }
    data, seconds = batches(), {name: [] for name in contestants}
    products = []
    for round_number in range(arguments.rounds + 1):
        for name, model in contestants.items():
            stopwatch = Stopwatch()
            model.fit(data, steps_per_epoch=arguments.steps, verbose=0, callbacks=[stopwatch])
            if round_number:  # the first one compiles
                seconds[name].append(statistics.median(stopwatch.seconds))
        products.append(seconds_of_products(repeats=3))
    ours = seconds.pop("dtransformer")
    result = {
        "tokens_per_second": {
            name: round(2 * BATCH * LENGTH / statistics.median(values), 1)
            for name, values in {"dtransformer": ours, **seconds}.items()
        },
        "times_as_fast_by_round": {
            name: [round(theirs / mine, 3) for theirs, mine in zip(values, ours)]
            for name, values in seconds.items()
        },
        "times_as_fast_as_the_better_median": round(
            statistics.median(min(pair) / mine for *pair, mine in zip(*seconds.values(), ours)), 3
        ),
        "share_of_products_limit": round(statistics.median(products) / statistics.median(ours), 3),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
