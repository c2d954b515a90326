"""Small trainings with one option each, identical on one process and on several ranks."""

import keras
import numpy as np
import tensorflow as tf

from dtransformer import parallel_config
from dtransformer.layers import CrossEntropyLoss
from dtransformer.parallel.runtime import job
from dtransformer.trainers import Trainer
from harness.measure import elements_sent
from harness.networks import VOCAB_SIZE, translation_model
from harness.training import STEPS, Record

BATCH = 8


def global_batches(num_batches=STEPS, vocab_size=VOCAB_SIZE, seed=0):
    """Return batches of sentences of different lengths, as lists of (source, target) rows."""
    rng = np.random.default_rng(seed)

    def sentence(longest):
        return rng.integers(4, vocab_size, rng.integers(1, longest + 1))

    return [[(sentence(9), sentence(7)) for _ in range(BATCH)] for _ in range(num_batches)]


def pad(rows):
    width = max(len(row) for row in rows)
    return np.array([np.pad(row, (0, width - len(row))) for row in rows], "int32")


def share(batches, weighted=False):
    """Return a dataset of this rank's rows of each batch, padded to the local maximum length.

    With `weighted`, sample weights mark the padding, as plain Keras losses require.
    """
    index, count = job.data_shard()

    def examples():
        for batch in batches:
            sources, targets = zip(*batch[index::count])
            inputs = {"source": pad(sources), "target": pad([[2, *row] for row in targets])}
            labels = pad([[*row, 3] for row in targets])
            yield (inputs, labels, (labels != 0).astype("float32"))[: 3 if weighted else 2]

    ids = tf.TensorSpec([None, None], "int32")
    spec = ({"source": ids, "target": ids}, ids, tf.TensorSpec([None, None]))
    spec = spec[: 3 if weighted else 2]
    return tf.data.Dataset.from_generator(examples, output_signature=spec)


def train(model, optimizer=None, loss=None, num_batches=STEPS, weighted=False, **compile_options):
    """Train on this rank's rows of the batches and return the results that tests compare."""
    trainer = Trainer(model)
    trainer.compile(
        optimizer or keras.optimizers.SGD(0.1, momentum=0.9),  # Tracing is faster than for AdamW.
        loss or CrossEntropyLoss(0.1, ignore_id=0),
        **compile_options,
    )
    record = Record()
    data = share(global_batches(num_batches, model.vocab_size), weighted)
    history = trainer.fit(data, callbacks=[record], verbose=0, shard=False)
    dev_data = share(global_batches(3, model.vocab_size, seed=1), weighted)
    evaluation = trainer.evaluate(dev_data, return_dict=True, verbose=0, shard=False)
    return {
        "sent": elements_sent(trainer),
        "parameters": model.count_params(),
        "first_step": record.first_step,
        "step_losses": record["step_loss"],
        "gradient_norms": record["gradient_norm"],
        "history": {name: [float(v) for v in values] for name, values in history.history.items()},
        "evaluation": {name: float(value) for name, value in evaluation.items()},
        "weights": float(sum(np.abs(weight).sum() for weight in model.get_weights())),
        "memory": {
            row.what: (row.planned, row.measured) for row in trainer.memory_report().rows[:3]
        },
    }


class Classifier(keras.Model):
    """Model of plain Keras layers with different random weights on each rank."""

    vocab_size = VOCAB_SIZE

    def __init__(self):
        super().__init__()
        self.embedding = keras.layers.Embedding(VOCAB_SIZE, 8)
        self.dense = keras.layers.Dense(VOCAB_SIZE, kernel_regularizer=keras.regularizers.L2(0.01))

    def call(self, inputs, training=False):
        return self.dense(self.embedding(inputs["target"]))


class HitRate(keras.metrics.Metric):
    """Custom metric with summed states. Keras' metrics would average over each padded row first."""

    state_reduction = "sum"

    def __init__(self, name="hit_rate"):
        super().__init__(name=name)
        self.hits = self.add_weight(shape=(), initializer="zeros", name="hits")
        self.count = self.add_weight(shape=(), initializer="zeros", name="count")

    def update_state(self, labels, outputs, sample_weight=None):
        hit = tf.cast(labels == tf.argmax(outputs, -1, "int32"), "float32")
        self.hits.assign_add(tf.reduce_sum(hit * sample_weight))
        self.count.assign_add(tf.reduce_sum(sample_weight))

    def result(self):
        return self.hits / self.count


def plain_keras():
    keras.utils.set_random_seed(job.rank())  # All ranks must use the weights of rank 0.
    return train(
        Classifier(),
        keras.optimizers.SGD(0.1),
        keras.losses.SparseCategoricalCrossentropy(
            from_logits=True, reduction="mean_with_sample_weight"
        ),
        weighted_metrics=[HitRate()],
        weighted=True,
    )


class Multiply(keras.Model):
    """Model that multiplies its inputs by a weight."""

    def __init__(self):
        super().__init__(dtype="mixed_float16")
        self.scale = self.add_weight(shape=(4,), initializer="ones", name="scale")

    def call(self, inputs, training=False):
        return inputs * self.scale


def overflow():
    """Train five steps in float16. The last rank's gradients overflow in the third."""
    trainer = Trainer(Multiply())
    trainer.compile(keras.optimizers.Adam(0.01), "mse")
    result = {"weights_by_step": []}
    for step in range(5):
        x = np.ones((2, 4), "float16")
        x[1] += job.rank()  # Each rank has different rows.
        if step == 2 and job.rank() == job.size() - 1:
            x[0, 0] = np.inf
        logs = trainer.train_on_batch(x, np.zeros((2, 4), "float32"), return_dict=True, shard=False)
        result["weights_by_step"].append(trainer.network.get_weights()[0].tolist())
        for name in ("step_loss", "loss", "loss_scale", "skipped_steps"):
            result.setdefault(name, []).append(float(logs[name]))
    result["step_losses"] = result["step_loss"][3:]
    result["weights"] = float(np.abs(trainer.network.get_weights()[0]).sum())
    return result


def sharded(task, level, **fields):
    """Execute a task with every weight sharded over the ranks."""
    with parallel_config(optimizer_shard=level, parallel_optimizer_threshold=0, **fields):
        return task()


def in_micro_batches(task):
    """Execute a task unchanged on one process, and with two micro-batches on several ranks."""
    with parallel_config(micro_batch_num=2 if job.size() > 1 else 1):
        return task()


def mixed_float16():
    # Two identical blocks share one function.
    model = translation_model(encoder_layers=2, dtype="mixed_float16")
    optimizer = keras.optimizers.AdamW(3e-3)
    return train(model, optimizer, num_batches=3)


TASKS = {
    "untied": lambda: train(translation_model()),
    "tied": lambda: train(
        translation_model(shared_embeddings=True, tied_head=True), keras.optimizers.AdamW(3e-3)
    ),
    "steps_per_execution": lambda: train(translation_model(), steps_per_execution=5),
    "plain_keras": plain_keras,
    "plain_keras_in_micro_batches": lambda: in_micro_batches(plain_keras),
    "micro_batches": lambda: in_micro_batches(lambda: train(translation_model())),
    "dropout": lambda: train(translation_model(dropout_rate=0.2), num_batches=3),
    "overflow": overflow,
    "overflow_at_level_2": lambda: sharded(overflow, 2),
    "overflow_at_level_3": lambda: sharded(overflow, 3),
    "sharded_sums_of_micro_batches": lambda: sharded(
        lambda: in_micro_batches(lambda: train(translation_model())),
        2,
        gradient_accumulation_shard=True,
    ),
    "level_3_recomputed": lambda: sharded(
        lambda: in_micro_batches(lambda: train(translation_model(tied_head=True))),
        3,
        recompute=True,
    ),
    "level_3_plain_keras_loss": lambda: sharded(
        lambda: train(
            translation_model(),
            loss=keras.losses.SparseCategoricalCrossentropy(
                from_logits=True, reduction="mean_with_sample_weight"
            ),
            weighted=True,
        ),
        3,
    ),
    "gradients_in_16_bits": lambda: sharded(
        lambda: train(translation_model(), num_batches=3), 1, gradient_dtype="bfloat16"
    ),
    "all_gradients_in_16_bits": lambda: sharded(
        lambda: train(translation_model(), num_batches=3), 0, gradient_dtype="float16"
    ),
    "mixed_float16": mixed_float16,
    "master_weights": lambda: sharded(mixed_float16, 1, recompute=True),
}
