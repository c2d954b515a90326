"""Layouts of a job, and small networks that are trained alike under each of them.

As a program it trains on every rank and writes what is compared. One launch runs any
number of layouts:

horovodrun -np 2 python -m tests.distributed.layouts FOLDER NETWORK/LAYOUT ...
"""

import argparse
import dataclasses
import itertools
import pathlib
import subprocess
import sys
import traceback

import keras
import numpy as np
import pytest
import tensorflow as tf

import dtransformer
from dtransformer.layers import CrossEntropyLoss
from dtransformer.models import CausalLM
from dtransformer.parallel import job
from dtransformer.parallel.sharded_variable import own_shards
from dtransformer.trainers import Trainer
from tests.distributed.jobs import STEPS, Record, translation_model
from tests.distributed.launch import launch

# Rows, source and target positions of the two kinds of batches: what the axes of every
# layout divide, and what they do not.
EVEN, UNEVEN = (8, 16, 8), (6, 13, 11)
# Adam divides by the size of a gradient, even if that is rounding noise: docs/parity.md.
EPSILON = 1e-6


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a job is divided.

    Args:
        data, model: number of slices of the batch and of the weights.
        ranks, devices: number of ranks, and of devices of each rank.
        rows: whether tables of embeddings are cut by rows (`vocab_emb_dp=False`).
        sequence: whether the residual stream is cut too (`sequence_parallel=True`).
        level: of optimizer sharding; weights of 1 KB and more are cut.
        stages, parts, schedule, chunks: of a pipeline, and the number of its micro-batches.
    """

    data: int = 1
    model: int = 1
    ranks: int = 1
    devices: int = 1
    rows: bool = False
    sequence: bool = False
    level: int = 0
    stages: int = 1
    parts: int = 1
    schedule: str = "1f1b"
    chunks: int = 1

    @property
    def name(self):
        """All of it, as in `dp2mp2@2x2+rows+sp`: two ranks of two devices each."""
        axes = f"dp{self.data}" * (self.data > 1) + f"mp{self.model}" * (self.model > 1)
        schedule = self.schedule + f"{self.chunks}" * (self.chunks > 1)
        axes += f"pp{self.stages}m{self.parts}-{schedule}" * (self.stages > 1)
        options = "+rows" * self.rows + "+sp" * self.sequence
        options += f"+shard{self.level}" * (self.level > 0)
        return f"{axes or 'alone'}@{self.ranks}x{self.devices}{options}"

    @property
    def num_blocks(self):
        """The number of blocks of the networks that are trained in a pipeline."""
        return max(4, self.stages * self.chunks)

    def start(self):
        """Join the job under this layout."""
        config = dtransformer.TransformerOpParallelConfig(
            data_parallel=self.data,
            model_parallel=self.model,
            vocab_emb_dp=not self.rows,
            sequence_parallel=self.sequence,
            optimizer_shard=self.level,
            parallel_optimizer_threshold=1,
            pipeline_stage=self.stages,
            micro_batch_num=self.parts,
            pipeline_schedule=self.schedule,
            pipeline_chunks=self.chunks,
        )
        dtransformer.init(config, local_devices=self.devices)


ALONE = Layout()

# data, model, ranks, devices of each rank
_GRIDS = (
    *[(2, 1, 1, 2), (1, 2, 1, 2), (2, 2, 1, 4), (1, 4, 1, 4)],
    *[(8, 1, 1, 8), (4, 2, 1, 8), (2, 4, 1, 8), (1, 8, 1, 8)],
    *[(2, 1, 2, 1), (1, 2, 2, 1), (2, 2, 2, 2), (1, 4, 2, 2)],
    *[(4, 1, 4, 1), (2, 2, 4, 1), (1, 4, 4, 1)],
)
_OPTIONS = tuple(itertools.product((False, True), repeat=2))
LAYOUTS = {
    layout.name: layout
    for grid in _GRIDS
    for layout in (Layout(*grid, *options) for options in _OPTIONS[: None if grid[1] > 1 else 1])
}
_SHARDED_GRIDS = (2, 1, 2, 1), (4, 1, 4, 1), (2, 2, 2, 2), (4, 2, 4, 2)
SHARDED = {
    layout.name: layout
    for grid in _SHARDED_GRIDS
    for layout in (Layout(*grid, level=level) for level in (1, 2, 3))
}
LAYOUTS.update(SHARDED)
# stages, micro-batches
_PIPELINES = (2, 2), (2, 4), (2, 8), (4, 4), (4, 8)
_SCHEDULES = {"1f1b": 1, "gpipe": 1, "interleaved": 2}
PIPELINES = {
    layout.name: layout
    for layout in [
        Layout(ranks=stages, stages=stages, parts=parts, schedule=schedule, chunks=chunks)
        for schedule, chunks in _SCHEDULES.items()
        for stages, parts in _PIPELINES
    ]
    # With the other ways to divide the work: ranks, devices of each, and what else there is.
    + [
        Layout(ranks=ranks, devices=devices, stages=2, parts=2, **others)
        for ranks, devices, others in (
            (2, 2, {"model": 2}),
            (4, 1, {"model": 2}),
            (4, 1, {"model": 2, "rows": True, "sequence": True}),
            (4, 2, {"model": 2, "data": 2}),
            (2, 2, {"model": 2, "schedule": "interleaved", "chunks": 2}),
            (4, 1, {"data": 2}),
            (4, 1, {"data": 2, "level": 1}),
            (4, 1, {"data": 2, "level": 2}),
            (4, 2, {"data": 2, "model": 2, "level": 2}),
            (2, 2, {"data": 2}),
        )
    ]
}
LAYOUTS.update(PIPELINES)


def untied(epsilon, **options):
    """Two vocabularies and a head with a bias; blocks that normalize first."""
    model = translation_model(61, target_vocab_size=59, head_bias=True, **_SIZES, **options)
    return model, keras.optimizers.AdamW(1e-3, weight_decay=0.1, epsilon=epsilon)


def tied(epsilon, **options):
    """One table for source, target and head; blocks that normalize last; clipping."""
    model = translation_model(
        61,
        shared_embeddings=True,
        tied_head=True,
        positions="learned",
        post_layernorm_residual=True,
        **_SIZES,
        **options,
    )
    return model, keras.optimizers.AdamW(
        1e-3, weight_decay=0.1, epsilon=epsilon, global_clipnorm=0.5
    )


def adamw(epsilon):
    """As `untied`; clipped by the norm of all gradients, and some weights do not decay."""
    return _without_decay(
        keras.optimizers.AdamW(1e-3, weight_decay=0.1, epsilon=epsilon, global_clipnorm=0.5)
    )


def sgd(_):
    """As `adamw`, with momentum; each gradient is clipped by its own norm."""
    return _without_decay(keras.optimizers.SGD(0.03, momentum=0.9, weight_decay=0.01, clipnorm=0.2))


def deep(epsilon, num_blocks=4):
    """As `adamw`, with more blocks."""
    return _without_decay(
        keras.optimizers.AdamW(1e-3, weight_decay=0.1, epsilon=epsilon, global_clipnorm=0.5),
        **_halves(num_blocks),
    )


def deep_tied(epsilon, num_blocks=4):
    """As `tied`, with more blocks."""
    return tied(epsilon, **_halves(num_blocks))


def deep_dropout(epsilon, num_blocks=4):
    """As `deep_tied`, with dropout: its masks depend on the number of micro-batches."""
    return tied(epsilon, dropout_rate=0.1, **_halves(num_blocks))


def deep_causal(epsilon, num_blocks=4):
    """A language model, tied."""
    model = CausalLM(61, num_layers=num_blocks, dropout_rate=0.0, **_SIZES)
    return model, keras.optimizers.AdamW(
        1e-3, weight_decay=0.1, epsilon=epsilon, global_clipnorm=0.5
    )


def lion(_):
    """As `adamw`; moves every entry alike."""
    return _without_decay(keras.optimizers.Lion(3e-4, weight_decay=0.1, global_clipnorm=0.5))


def _without_decay(optimizer, **options):
    model, _ = untied(EPSILON, **options)
    optimizer.exclude_from_weight_decay(var_names=["bias", "gamma", "beta"])
    return model, optimizer


_SIZES = {"hidden_size": 32, "num_heads": 8, "ffn_hidden_size": 64}
NETWORKS = {"untied": untied, "tied": tied, "adamw": adamw, "sgd": sgd, "lion": lion}
# Those for pipelines take a number of blocks.
DEEP_NETWORKS = {
    **{"deep": deep, "deep_tied": deep_tied},
    **{"deep_dropout": deep_dropout, "deep_causal": deep_causal},
}
NETWORKS.update(DEEP_NETWORKS)


def _halves(num_blocks):
    return {"encoder_layers": num_blocks // 2, "decoder_layers": num_blocks - num_blocks // 2}


def make(network, epsilon=EPSILON, num_blocks=4):
    """Return a network and its optimizer."""
    options = {"num_blocks": num_blocks} if network in DEEP_NETWORKS else {}
    return NETWORKS[network](epsilon, **options)


def batches(num_batches, vocab_size, seed, same_rows=False):
    """Return batches of (inputs, labels): sentences of different lengths, padded.

    The two kinds of batches come in turn; with `same_rows` they have the same number of rows.
    """
    rng = np.random.default_rng(seed)

    def sentences(num_rows, width):
        lengths = rng.integers(1, width, num_rows)
        rows = [rng.integers(4, vocab_size, length) for length in lengths]
        return np.stack([np.pad(row, (0, width - len(row))) for row in rows]).astype("int32")

    made = []
    for number in range(num_batches):
        num_rows, source_width, target_width = UNEVEN if number % 2 else EVEN
        num_rows = EVEN[0] if same_rows else num_rows
        source, labels = sentences(num_rows, source_width), sentences(num_rows, target_width)
        target = np.pad(labels, ((0, 0), (1, 0)), constant_values=2)[:, :-1]
        labels[range(num_rows), np.count_nonzero(labels, axis=1)] = 3
        made.append(({"source": source, "target": target}, labels))
    return made


def share(network, num_batches, vocab_size, seed=0):
    """Return a dataset of this rank's rows of each batch.

    The networks for pipelines have batches that can be divided into micro-batches.
    """
    index, count = job.data_shard()
    whole = batches(num_batches, vocab_size, seed, same_rows=network in DEEP_NETWORKS)
    ids = tf.TensorSpec([None, None], "int32")
    data = tf.data.Dataset.from_generator(
        lambda: (tf.nest.map_structure(lambda x: x[index::count], batch) for batch in whole),
        output_signature=({"source": ids, "target": ids}, ids),
    )
    return data.map(lambda x, y: (x["target"], y)) if network == "deep_causal" else data


def train(network, num_steps=STEPS, epsilon=EPSILON, num_blocks=4):
    """Train a network under the current layout.

    All ranks have to call, as each holds a part of the weights.

    Returns:
        The trainer; and a dict of arrays: `"losses"` of all steps; each weight, whole,
        before and after, as `"initial/PATH"` and `"final/PATH"`; and `"bytes"`, what
        this rank holds of them.
    """
    model, optimizer = make(network, epsilon, num_blocks)
    model.build()
    results = _read_weights(model, "initial")
    trainer = Trainer(model)
    trainer.compile(optimizer, CrossEntropyLoss(0.1, ignore_id=0))
    record = Record()
    data = share(network, num_steps, model.vocab_size)
    trainer.fit(data, callbacks=[record], verbose=0)
    results["losses"] = np.array([logs["step_loss"] for logs in record.logs])
    shards = own_shards(model.variables)
    results["bytes"] = np.array(sum(shard.numpy().nbytes for shard in shards))
    memory = trainer.memory_report()
    results["planned"] = np.array([row.planned for row in memory.rows[:3]])
    results["measured"] = np.array([row.measured for row in memory.rows[:3]])
    sent = trainer.communication_report().collectives
    results["sent"] = np.array(sum(c.elements_sent for c in sent if c.over == "horovod"))
    return trainer, {**results, **_read_weights(model, "final")}


def use(trainer, network, folder, layout):
    """Use a trained network in every other way; return a dict of arrays.

    It generates with the initial weights, as 20 steps teach it to end at once. It loads
    the weights that one process has saved in the folder, where there are any.
    """
    model = trainer.network
    inputs, _ = batches(2, model.vocab_size, seed=2)[1]
    data = share(network, 1, model.vocab_size, seed=1)
    evaluation = trainer.evaluate(data, verbose=0, return_dict=True)
    fresh, _ = make(network, num_blocks=layout.num_blocks)
    results = {
        "evaluation": np.array([evaluation["loss"], evaluation["accuracy"]]),
        "logits": trainer.predict(inputs, verbose=0),
        "greedy": fresh.generate(inputs["source"], max_length=8).numpy(),
        "beam": fresh.generate(inputs["source"], beam_size=3, max_length=8).numpy(),
    }
    trainer.save_weights(weights_file(folder, network, layout))
    if layout != ALONE:
        Trainer(fresh).load_weights(weights_file(folder, network, ALONE))
        results.update(_read_weights(fresh, "loaded"))
    return results


def _read_weights(model, kind):
    return {f"{kind}/{weight.path}": np.array(weight.numpy()) for weight in model.weights}


def weights_file(folder, network, layout):
    """Return where the weights of a network are, trained under a layout."""
    return pathlib.Path(folder) / f"{network}-{layout.name}.weights.h5"


def result_file(folder, network, layout, rank=0):
    """Return where the results of a rank are."""
    return pathlib.Path(folder) / f"{network}-{layout.name}-rank{rank}.npz"


def read(folder, network, layout, rank=0):
    """Return the results of a rank, a dict of arrays; None where it has failed."""
    path = result_file(folder, network, layout, rank)
    if not path.exists():
        return None
    with np.load(path) as results:
        return dict(results)


def read_all(folder, network, layout):
    """Return the results of all ranks in one dict; None where a rank has failed."""
    together = {}
    for rank in reversed(range(layout.ranks)):
        results = read(folder, network, layout, rank)
        if results is None:
            return None
        together.update(results)
    return together


def weights(results, kind):
    """Return the weights of `train`'s results by path; `kind` is "initial" or "final"."""
    prefix = f"{kind}/"
    return {
        name.removeprefix(prefix): value
        for name, value in results.items()
        if name.startswith(prefix)
    }


def true_part(weight, expected):
    """Return a weight without the padding of its vocabulary."""
    return weight[tuple(slice(size) for size in expected.shape)]


def assert_same(found, expected):
    """Asserts that weights are equal to the last bit, padding of vocabularies aside."""
    assert set(found) == set(expected)
    for path, value in expected.items():
        np.testing.assert_array_equal(true_part(found[path], value), value, err_msg=path)


def differences(results, expected, network):
    """Compare the results of `train` with those of one process.

    Of weights that Lion trains the nearest 99 % of the entries are compared: rounding noise
    turns the sign of a gradient near 0, as all of an attention's key bias are.

    Returns:
        A dict: `"loss"`, the largest relative difference of a loss; `"weights"`, the
        largest difference of an entry after the last step, and `"where"` it is.
    """
    trained, by_weight = weights(results, "final"), {}
    for path, value in weights(expected, "final").items():
        errors = np.abs(true_part(trained[path], value) - value)
        if network != "lion":
            by_weight[path] = float(errors.max())
        elif not path.endswith("key_bias"):
            by_weight[path] = float(np.quantile(errors, 0.99))
    where = max(by_weight, key=lambda name: np.nan_to_num(by_weight[name], nan=np.inf))
    loss = np.abs(results["losses"] / expected["losses"] - 1).max()
    return {"loss": float(loss), "weights": by_weight[where], "where": where}


def launch_runs(num_ranks, folder, runs, timeout, options=()):
    """Run this program; return the exit code and all output.

    Args:
        num_ranks: number of ranks; for 1 Horovod is not needed.
        folder: where results are written.
        runs: list of "NETWORK/LAYOUT".
        timeout: seconds, after which it is ended.
        options: list of further arguments.
    """
    arguments = ["-m", "tests.distributed.layouts", str(folder), *runs, *options]
    try:
        if num_ranks > 1:
            return launch(num_ranks, arguments, timeout)
        process = subprocess.run(
            [sys.executable, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired as error:
        return 1, f"{error}\n{(error.stdout or b'').decode()}"
    except pytest.fail.Exception as error:
        return 1, error.msg
    return process.returncode, process.stdout


def parse(run):
    """Return the network and the `Layout` of a "NETWORK/LAYOUT"."""
    network, name = run.split("/")
    return network, LAYOUTS[name]


def reader(folder, runs, used):
    """Return a function of a run that returns what each of its ranks gives.

    The first run of a number of ranks launches all of that number.

    Args:
        folder: where results are written.
        runs: list of "NETWORK/LAYOUT".
        used: those of them that are used, too.
    """
    outputs = {}

    def ranks_of(run):
        network, layout = parse(run)
        if layout.ranks not in outputs:
            together = [other for other in runs if parse(other)[1].ranks == layout.ranks]
            options = ["--use", *used]
            outputs[layout.ranks] = launch_runs(layout.ranks, folder, together, 600, options)[1]
        results = [read(folder, network, layout, rank) for rank in range(layout.ranks)]
        if None in results:
            pytest.fail(f"{run} failed:\n{outputs[layout.ranks][-20000:]}")
        return results

    return ranks_of


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("runs", nargs="+", metavar="NETWORK/LAYOUT")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--epsilon", type=float, default=EPSILON)
    parser.add_argument("--use", nargs="*", default=(), help="runs that are used, too")
    arguments = parser.parse_args()
    failed = False
    for run in arguments.runs:
        network, layout = parse(run)
        try:
            layout.start()
            trainer, results = train(network, arguments.steps, arguments.epsilon, layout.num_blocks)
            if run in arguments.use:
                results.update(use(trainer, network, arguments.folder, layout))
        except Exception:  # the same on all ranks, as a rule: the next layout can be run
            print(f"{run} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            failed = True
        else:
            np.savez(result_file(arguments.folder, network, layout, job.rank()), **results)
    dtransformer.shutdown()  # waits for ranks that are still reading
    sys.exit(failed)


if __name__ == "__main__":
    main()
