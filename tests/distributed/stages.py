"""What stages of a pipeline do on real ranks, besides parity: a program that tests launch.

horovodrun -np 2 python -m tests.distributed.stages FOLDER [SLEEPY_RUNS]
"""

import json
import pathlib
import random
import sys
import time

import keras
import numpy as np
import tensorflow as tf

import dtransformer
from dtransformer.layers import CrossEntropyLoss
from dtransformer.layers.base import Layer
from dtransformer.models import CausalLM
from dtransformer.parallel import job
from dtransformer.parallel.pipeline import schedules
from dtransformer.trainers import Trainer
from dtransformer.trainers.engines.pipeline_step import PipelineStep
from tests.distributed import jobs
from tests.trainers.pipeline.v_schedule import V_SCHEDULE

NUM_STAGES, ROWS, WIDTH, VOCAB = 2, 8, 6, 12
SCHEDULES = {"1f1b": 1, "gpipe": 1, "interleaved": 2}  # and the number of their chunks
SECONDS = 2e-3  # most that a stage sleeps before an instruction


def start(**fields):
    """Join the job as a pipeline; alone as one process that takes the same micro-batches."""
    stages = NUM_STAGES if job.size() > 1 else 1
    if stages == 1:
        fields = {"micro_batch_num": fields.get("micro_batch_num", 1)}
    dtransformer.init(dtransformer.TransformerOpParallelConfig(pipeline_stage=stages, **fields))


def words(seed=0):
    ids = np.random.default_rng(seed).integers(4, VOCAB, (ROWS, WIDTH + 1)).astype("int32")
    return ids[:, :-1], ids[:, 1:]


class Scale(Layer):
    """Multiplies with a weight; gradients of rows with a flag overflow."""

    def __init__(self, stage, **kwargs):
        super().__init__(**kwargs)
        self.pipeline_stage = stage

    def build(self, shape, *args):
        self.scale = self.add_weight((VOCAB,), "ones", axes=(None,), name="scale")
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
    """A layer on each stage; the first one's gradient alone overflows."""

    def __init__(self):
        super().__init__(dtype="mixed_float16")
        self.first = Scale(0, dtype=self.dtype_policy, name="first")
        self.second = Scale(-1, dtype=self.dtype_policy, name="second")

    def call(self, inputs, training=False):
        x = self.first(inputs["x"], inputs["overflows"])
        return self.second(x, tf.zeros_like(inputs["overflows"]))


def overflow_on_one_stage():
    start(micro_batch_num=4)
    trainer = Trainer(TwoScales())
    trainer.compile(keras.optimizers.Adam(0.01), CrossEntropyLoss())
    _, labels = words()
    x = np.random.default_rng(1).normal(size=(ROWS, WIDTH, VOCAB)).astype("float16")
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
    return CausalLM(VOCAB, num_layers=4, **options)


def keras_metrics():
    start(micro_batch_num=4)
    trainer = Trainer(small_model())
    trainer.compile(
        "adam",
        CrossEntropyLoss(),
        metrics=["sparse_categorical_accuracy"],
        weighted_metrics=[jobs.HitRate()],
    )
    weights = np.random.default_rng(2).random((ROWS, WIDTH)).astype("float32")
    options = {"sample_weight": weights, "epochs": 3, "shuffle": False, "verbose": 0}
    logs = trainer.fit(*words(), **options).history
    evaluation = trainer.evaluate(*words(1), sample_weight=weights, verbose=0, return_dict=True)
    names = ["sparse_categorical_accuracy", "hit_rate", "loss", "accuracy"]
    return {name: [*map(float, logs[name]), float(evaluation[name])] for name in names}


def losses_of_sleepy_stages(num_runs):
    """Losses of runs of ten steps, without sleeps and with them, for each schedule."""
    run, result = PipelineStep.run, {}
    rng = random.Random(job.rank())

    def sleepy(step, instruction):
        time.sleep(rng.random() * SECONDS)
        run(step, instruction)

    for schedule, chunks in SCHEDULES.items():
        start(micro_batch_num=4, pipeline_schedule=schedule, pipeline_chunks=chunks)
        trainer = Trainer(small_model())
        trainer.compile(keras.optimizers.SGD(0.1), CrossEntropyLoss())
        trainer.network.build()
        first = trainer.network.get_weights()
        result[schedule] = []
        PipelineStep.run = run
        for _ in range(1 + num_runs // 3):
            trainer.network.set_weights(first)
            result[schedule].append(losses_of_ten_steps(trainer))
            PipelineStep.run = sleepy
    PipelineStep.run = run
    return result


def losses_of_ten_steps(trainer):
    logs = [trainer.train_on_batch(*words(s), return_dict=True) for s in range(10)]
    return [float(log["step_loss"]) for log in logs]


def losses_alone():
    start()
    trainer = Trainer(small_model())
    trainer.compile(keras.optimizers.SGD(0.1), CrossEntropyLoss())
    return losses_of_ten_steps(trainer)


def v_shaped():
    """Ten steps of a schedule of the tests' own, whose last chunk is on the first stage."""
    start(micro_batch_num=4, pipeline_schedule="v", pipeline_chunks=2)
    trainer = Trainer(small_model())
    trainer.compile(keras.optimizers.SGD(0.1), CrossEntropyLoss())
    result = {"losses": losses_of_ten_steps(trainer)}
    result["evaluation"] = float(trainer.evaluate(*words(1), verbose=0, return_dict=True)["loss"])
    result["logits"] = trainer.predict(words(1)[0], verbose=0).tolist()
    blocks = [block for block in trainer.network.blocks.blocks if block.weights]
    result["blocks"] = [block.name for block in blocks]
    sent = [c for c in trainer.communication_report().collectives if c.kind == "send/recv"]
    result["sent"] = [[c.layer, c.backward] for c in sent]
    return result


def reports():
    """The timeline and what is sent, of a step with four micro-batches of two rows."""
    start(micro_batch_num=4)
    trainer = Trainer(small_model())
    trainer.compile("adam", CrossEntropyLoss())
    trainer.train_on_batch(*words())
    timeline = trainer.timeline()
    events = [
        [str(event.instruction), event.stage, event.start, event.end] for event in timeline.events
    ]
    sent = [c for c in trainer.communication_report().collectives if c.kind == "send/recv"]
    activations = trainer.memory_report()["activations"].planned
    return {
        "events": events,
        "bubble": timeline.bubble,
        "sent": [[c.layer, list(c.shape), c.backward, c.bytes_sent] for c in sent],
        "activations": activations,
    }


def errors():
    """What is said of wrong batches, before anything is built, and when stages differ."""
    start(micro_batch_num=4)
    found = {}
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
            found[name] = [str(error), bool(trainer.network.weights)]
    return found


JOBS = {
    job.__name__: job for job in (overflow_on_one_stage, keras_metrics, reports, errors, v_shaped)
}


def main(folder, num_runs=12):
    schedules.SCHEDULES["v"] = V_SCHEDULE
    dtransformer.init()
    results = {name: job() for name, job in JOBS.items()}
    results["losses_of_sleepy_stages"] = losses_of_sleepy_stages(int(num_runs))
    path = pathlib.Path(folder) / f"rank{job.rank()}.json"
    path.write_text(json.dumps(results), encoding="utf-8")
    dtransformer.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
