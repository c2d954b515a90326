"""Contestant: dtransformer's translation model on rows of packed sentences."""

import itertools

import numpy as np
from fitted import Stopwatch
from ours import compiled_trainer
from workloads import serve

from dtransformer.datasets import TranslationBatches


def make_run(workload):
    trainer = compiled_trainer(workload, ignore_id=0)
    pairs = [(np.concatenate(ids), np.cumsum([0, *map(len, ids)])) for ids in workload.pairs()]
    sides = [(ids.astype("int32"), splits.astype("int64")) for ids, splits in pairs]
    options = {"packed_length": workload.length, "max_length": workload.length - 1}
    num_rows = len(TranslationBatches(*sides, batch_size=1, **options))  # Total rows.
    batches = TranslationBatches(*sides, batch_size=-(-num_rows // workload.num_batches), **options)
    assert len(batches) == workload.num_batches, (num_rows, len(batches))
    data = batches.as_dataset().cache().repeat()

    def run(passes):
        stopwatch, size = Stopwatch(), workload.num_batches
        extra = trainer.network.built  # The first step includes preparation.
        trainer.fit(data, steps_per_epoch=passes * size + extra, verbose=0, callbacks=[stopwatch])
        ends = stopwatch.ends if extra else [stopwatch.start, *stopwatch.ends]
        return [end - begin for begin, end in itertools.pairwise(ends[::size])]

    return run


if __name__ == "__main__":
    serve(make_run)
