"""Kill and restart a training run at random moments, compare the weights, and print JSON.

    python benchmarks/checkpoint_kills.py
    python benchmarks/checkpoint_kills.py --ranks 2 --kills 5

The run saves a checkpoint after every step, so that most kills happen during a save. Each restart
must resume from the newest complete checkpoint. At the end, the weights must equal the weights of an
uninterrupted run bit for bit.
"""

import argparse
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time

import paths  # noqa: F401

from dtransformer.parallel.runtime import job
from harness.launch import make_command


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=60, help="epochs of 26 steps")
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="maximum seconds from start to kill"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random moments")
    parser.add_argument("--worker", choices=["train", "whole"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser.parse_args()


def work(args):
    """Train. With `--worker train`, resume from the newest checkpoint and save every step."""
    import hashlib

    import keras
    import numpy as np
    import tensorflow as tf

    import dtransformer
    from dtransformer.datasets.batching import TranslationBatches
    from dtransformer.layers import CrossEntropyLoss
    from dtransformer.models import TranslationTransformer
    from dtransformer.trainers import ModelCheckpoint, Trainer

    dtransformer.init(dtransformer.TransformerOpParallelConfig(optimizer_shard=args.ranks > 1))
    random_generator, (index, count) = np.random.default_rng(0), job.data_shard()
    ids = tf.ragged.constant(
        [random_generator.integers(4, 200, 8).tolist() for _ in range(416)], "int32"
    )
    batches = TranslationBatches(ids, ids, batch_size=16, shard_index=index, num_shards=count)
    model = TranslationTransformer(
        200, hidden_size=64, num_heads=2, encoder_layers=1, decoder_layers=1, dropout_rate=0.1
    )
    trainer = Trainer(model)
    trainer.compile(keras.optimizers.AdamW(1e-3), CrossEntropyLoss(0.1, ignore_id=0))

    class Begun(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.first = int(self.model.optimizer.iterations)

        def on_train_batch_end(self, batch, logs=None):  # The first step compiles.
            if dtransformer.is_chief() and self.model.optimizer.iterations == self.first + 1:
                print(f"begun at {self.first}", flush=True)

    resumes = args.worker == "train"
    saving = [ModelCheckpoint(args.folder, every_steps=1, keep=3)] if resumes else []
    trainer.fit(
        batches,
        epochs=args.epochs,
        verbose=0,
        callbacks=[Begun(), *saving],
        resume=resumes,
        shard=False,
    )
    if dtransformer.is_chief():
        content = b"".join(weight.tobytes() for weight in model.get_weights())
        steps = int(trainer.optimizer.iterations)
        print(f"ended at {steps} with {hashlib.sha256(content).hexdigest()}", flush=True)
    dtransformer.shutdown()


class Life:
    """Process that starts or resumes the run."""

    def __init__(self, args, folder, worker):
        arguments = [__file__, *sys.argv[1:], "--folder", folder, "--worker", worker]
        self.process = subprocess.Popen(
            make_command(args.ranks, arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def wait_for(self, word, timeout=120):
        """Wait for a line of output with this word and return the words after it."""
        lines, timer = [], threading.Timer(timeout, os.killpg, (self.process.pid, signal.SIGKILL))
        timer.start()  # The run may print nothing.
        try:
            for line in self.process.stdout:
                lines.append(line)
                if word in line:
                    return line.partition(word)[2].split()
        finally:
            timer.cancel()
        self.kill()
        sys.exit(f"The run did not print {word!r}. Its output:\n{''.join(lines)[-4000:]}")

    def kill(self):
        """Kill all ranks and wait until they have ended."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


def newest(folder):
    """Return the step of the newest complete checkpoint, and whether one is being written."""
    complete = pathlib.Path(folder).glob("step-????????/checkpoint.json")
    steps = [int(manifest.parent.name.removeprefix("step-")) for manifest in complete]
    return max(steps, default=0), any(pathlib.Path(folder).glob("step-*.unfinished"))


def main():
    args = parse_arguments()
    if args.worker:
        return work(args)
    random_moments, kills = random.Random(args.seed), []
    with tempfile.TemporaryDirectory() as folder:
        uninterrupted = Life(args, folder, "whole")
        expected = uninterrupted.wait_for("ended at", 600)
        uninterrupted.process.communicate()
        began_at, saved = 0, 0
        for kill_index in range(args.kills):
            life = Life(args, folder, "train")
            if kill_index % 5 == 4:  # Kill some runs during their start.
                time.sleep(random_moments.uniform(0, 5))
            else:
                began_at = int(life.wait_for("begun at")[0])
                if began_at != saved:
                    sys.exit(f"A run resumed at step {began_at} instead of the newest {saved}.")
                time.sleep(random_moments.uniform(0, args.seconds))
            life.kill()
            saved, is_writing = newest(folder)
            kills.append({"began_at": began_at, "saved": saved, "while_saving": is_writing})
            print(kills[-1], file=sys.stderr)
        last = Life(args, folder, "train")
        began_at = int(last.wait_for("begun at")[0])
        ended = last.wait_for("ended at", 600)
        last.process.communicate()
    report = {
        "kills": len(kills),
        "while_saving": sum(kill["while_saving"] for kill in kills),
        "all_began_at_the_newest": began_at == saved,
        "steps_when_killed": [kill["saved"] for kill in kills],
        "steps": int(ended[0]),
        "same_weights": ended == expected,
    }
    print(json.dumps(report, indent=2))
    sys.exit(not (report["same_weights"] and report["all_began_at_the_newest"]))


if __name__ == "__main__":
    main()
