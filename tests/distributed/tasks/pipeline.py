"""Train pipelines on ranks with overflows, metrics, delays, frozen stages, reports and errors."""

import contextlib
import random
import time
import unittest.mock

import keras
import numpy as np
import tensorflow as tf

import dtransformer
from dtransformer.layers import CrossEntropyLoss
from dtransformer.layers.base import Layer
from dtransformer.models import CausalLM
from dtransformer.parallel.runtime import job
from dtransformer.parallel.schedules import schedules
from dtransformer.parallel.zero import units
from dtransformer.trainers import Trainer
from dtransformer.trainers.engines.pipeline_step import PipelineStep
from harness.tasks import HitRate
from tests.parallel.pipeline_parallel.v_schedule import V_SCHEDULE

ROWS, WIDTH, VOCAB_SIZE = 8, 6, 12
SECONDS = 2e-3  # Maximum delay of a stage before an instruction.


def words(seed=0):
    ids = np.random.default_rng(seed).integers(4, VOCAB_SIZE, (ROWS, WIDTH + 1)).astype("int32")
    return ids[:, :-1], ids[:, 1:]


class Scale(Layer):
    """Layer that multiplies by a weight. The gradient overflows if a flag is set."""

    def __init__(self, stage, **kwargs):
        super().__init__(**kwargs)
        self.pipeline_stage = stage

    def build(self, shape, *args):
        self.scale = self.add_weight((VOCAB_SIZE,), "ones", axes=(None,), name="scale")
        self.built = True

    def call(self, x, flags):
        @tf.custom_gradient
        def scaled(x, scale):
            def gradient(dy):
                size = tf.where(tf.reduce_any(flags), tf.constant(np.inf, dy.dtype), 1)
                return dy * scale, tf.reduce_sum(dy * x * size, [0, 1])

            return x * scale, gradient

        return scaled(tf.cast(x, self.compute_dtype), tf.cast(self.scale, self.compute_dtype))


class TwoScales(keras.Model):
    """Model with one layer on each stage. Only the gradient of the first layer overflows."""

    def __init__(self):
        super().__init__(dtype="mixed_float16")
        self.first = Scale(0, dtype=self.dtype_policy, name="first")
        self.second = Scale(-1, dtype=self.dtype_policy, name="second")

    def call(self, inputs, training=False):
        x = self.first(inputs["x"], inputs["overflows"])
        return self.second(x, tf.zeros_like(inputs["overflows"]))


def overflow_on_one_stage():
    trainer = Trainer(TwoScales())
    trainer.compile(keras.optimizers.Adam(0.01), CrossEntropyLoss())
    _, labels = words()
    x = np.random.default_rng(1).normal(size=(ROWS, WIDTH, VOCAB_SIZE)).astype("float16")
    result = {"weights": []}
    for step in range(5):
        overflows = np.arange(ROWS) == (5 if step == 2 else -1)
        logs = trainer.train_on_batch({"x": x, "overflows": overflows}, labels, return_dict=True)
        result["weights"].append([weight.tolist() for weight in trainer.network.get_weights()])
        for name in ("step_loss", "loss_scale", "skipped_steps"):
            result.setdefault(name, []).append(float(logs[name]))
    return result


def small_model(**options):
    options = {"hidden_size": 16, "num_heads": 2, "dropout_rate": 0.0, **options}
    return CausalLM(VOCAB_SIZE, num_layers=4, **options)


def keras_metrics():
    trainer = Trainer(small_model())
    trainer.compile(
        "adam",
        CrossEntropyLoss(),
        metrics=["sparse_categorical_accuracy"],
        weighted_metrics=[HitRate()],
    )
    weights = np.random.default_rng(2).random((ROWS, WIDTH)).astype("float32")
    options = {"sample_weight": weights, "epochs": 3, "shuffle": False, "verbose": 0}
    logs = trainer.fit(*words(), **options).history
    evaluation = trainer.evaluate(*words(1), sample_weight=weights, verbose=0, return_dict=True)
    names = ["sparse_categorical_accuracy", "hit_rate", "loss", "accuracy"]
    return {name: [*map(float, logs[name]), float(evaluation[name])] for name in names}


def losses(is_short=False):
    """Return the losses of ten steps, and of the same steps with random delays."""
    trainer = Trainer(small_model())
    trainer.compile(keras.optimizers.SGD(0.1), CrossEntropyLoss())
    trainer.network.build()
    initial_weights = trainer.network.get_weights()
    result = {"without_sleeps": _ten_steps(trainer), "with_sleeps": []}
    run, rng = PipelineStep.run, random.Random(job.rank())

    def run_with_delay(step, instruction):
        time.sleep(rng.random() * SECONDS)
        run(step, instruction)

    PipelineStep.run = run_with_delay
    try:
        for _ in range((1 if is_short else 4) if job.size() > 1 else 0):
            trainer.network.set_weights(initial_weights)
            result["with_sleeps"].append(_ten_steps(trainer))
    finally:
        PipelineStep.run = run
    return result


def _ten_steps(trainer):
    logs = [trainer.train_on_batch(*words(s), return_dict=True) for s in range(10)]
    return [float(log["step_loss"]) for log in logs]


def v_shaped():
    """Train ten steps with a custom schedule that has the last chunk on the first stage."""
    schedules.SCHEDULES["v"] = V_SCHEDULE
    stages = min(job.size(), 2)
    options = {"pipeline_schedule": "v", "pipeline_chunks": 2} if stages > 1 else {}
    dtransformer.init(
        dtransformer.TransformerOpParallelConfig(
            pipeline_stage=stages, micro_batch_num=4, **options
        )
    )
    trainer = Trainer(small_model())
    trainer.compile(keras.optimizers.SGD(0.1), CrossEntropyLoss())
    result = {"losses": _ten_steps(trainer)}
    result["evaluation"] = float(trainer.evaluate(*words(1), verbose=0, return_dict=True)["loss"])
    result["logits"] = trainer.predict(words(1)[0], verbose=0)
    blocks = [block for block in trainer.network.blocks.blocks if block.weights]
    result["blocks"] = [block.name for block in blocks]
    sent = [c for c in trainer.communication_report().collectives if c.kind == "send/recv"]
    result["sent"] = [[c.layer, c.backward] for c in sent]
    return result


def frozen():
    """Train with a last stage that is frozen except for a shared table."""
    model = small_model()
    trainer = Trainer(model)
    before = trainer(words()[0])
    for layer in (*model.blocks.blocks[2:], model.blocks.final_norm):
        layer.trainable = False
    trainer.compile(keras.optimizers.SGD(0.1, global_clipnorm=0.05), CrossEntropyLoss())
    history = trainer.fit(*words(), batch_size=8, epochs=5, verbose=0)
    return {"before": before.numpy(), **history.history}


def reports():
    """Return timeline and transfers of a step with four micro-batches of two rows."""
    trainer = Trainer(small_model())
    trainer.compile("adam", CrossEntropyLoss())
    trainer.train_on_batch(*words())
    timeline = trainer.timeline()
    events = [
        [str(event.instruction), event.stage, event.start, event.end] for event in timeline.events
    ]
    collectives = trainer.communication_report().collectives
    sent = [c for c in collectives if c.kind == "send/recv"]
    shared = [c for c in collectives if c.over == "ranks" and c.group_size == job.size()]
    activations = trainer.memory_report()["activations"].planned
    return {
        "events": events,
        "bubble": timeline.bubble,
        "sent": [[c.layer, list(c.shape), c.backward, c.bytes_sent] for c in sent],
        "shared": [[c.layer, c.kind, list(c.shape), c.bytes_sent] for c in shared],
        "activations": activations,
        "stages": trainer.plan().stages,
    }


class CountedLoss(CrossEntropyLoss):
    """Loss that counts its traces."""

    traces = 0

    def per_token(self, *args, **kwargs):
        CountedLoss.traces += 1
        return super().per_token(*args, **kwargs)


def shapes():
    """Train on texts of three lengths. The trace of the second length serves all later ones."""
    trainer = Trainer(small_model())
    trainer.compile(keras.optimizers.SGD(0.1), CountedLoss())
    texts = [words(seed)[0][:, : WIDTH - seed] for seed in range(3)]
    spec = tf.TensorSpec([ROWS, None], "int32")
    batches = tf.data.Dataset.from_generator(
        lambda: ((x[:, :-1], x[:, 1:]) for x in texts), output_signature=(spec, spec)
    )
    history = trainer.fit(batches, epochs=2, verbose=0).history
    return {"loss": history["loss"], "traces": CountedLoss.traces}


def errors():
    """Return the error messages for wrong numbers of rows, and for batches that differ by stage."""
    messages = {}
    x, y = words()
    for name, rows, options in (
        ("rows", 6, {}),
        ("last_rows", 8, {"batch_size": 5}),
        ("order", 8, {"shuffle": False}),
    ):
        trainer = Trainer(small_model())
        trainer.compile("adam", CrossEntropyLoss())
        if name == "order" and job.rank():
            x, y = x[::-1], y[::-1]
        try:
            trainer.fit(x[:rows], y[:rows], verbose=0, **options)
        except ValueError as error:
            messages[name] = [str(error), bool(trainer.network.weights)]
    return messages


def stored_weights():
    """Return the gathered weights that chunks store between their passes, with and without units.

    Hidden sizes differ from the batch's sizes, so that activations have no shape of a weight.
    """
    x, y = words()
    result = {}
    for name, replaced in (("with_units", {}), ("without_units", {"return_value": False})):
        network = CausalLM(52, hidden_size=24, num_heads=2, ffn_hidden_size=40, num_layers=2)
        trainer = Trainer(network)
        trainer.compile("adam", CrossEntropyLoss())
        patch = unittest.mock.patch.object(units, "is_gathered", **replaced)
        with patch if replaced else contextlib.nullcontext():
            trainer.train_on_batch(x, y)
        engine = trainer._program.engine
        graphs = [graph for part in engine._graphs.values() for graph in part]
        graphs += [function._graph for function, _ in engine._compiled if job.mesh() is not None]
        sharded = [w for w in network.trainable_variables if units.is_gathered(w)]
        shapes = {tuple(weight.shape) for weight in sharded}
        outputs = [x for graph in graphs for x in graph.outputs]
        # Stored shards on a mesh have the full shape. They are arguments, without a layer's name.
        result[name] = [x.name for x in outputs if tuple(x.shape) in shapes and "/" in x.name]
        result["shapes"] = sorted(map(list, shapes))
    return result


_ALL = (
    *(overflow_on_one_stage, keras_metrics, losses, v_shaped, frozen),
    *(reports, shapes, errors, stored_weights),
)
TASKS = {task.__name__: task for task in _ALL}
