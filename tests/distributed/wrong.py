"""Does on every rank what has to end in an error, and prints each: a program that tests launch."""

import os
import pathlib
import shutil
import tempfile

import tensorflow as tf

import dtransformer
import dtransformer.trainers
from dtransformer.parallel import job
from dtransformer.parallel.object_collectives import from_chief
from dtransformer.trainers.checkpoint import writer
from tests.distributed import jobs


def different_configs():
    groups = 4 + job.rank()
    dtransformer.init(dtransformer.TransformerOpParallelConfig(gradient_aggregation_group=groups))


def different_seeds():
    dtransformer.init(seed=job.rank())


def wrong_product():
    dtransformer.init(dtransformer.TransformerOpParallelConfig(data_parallel=3))


def different_numbers_of_batches():
    trainer = dtransformer.trainers.Trainer(jobs.translation_model())
    trainer.compile()
    batches = jobs.share(jobs.global_batches(2 + job.rank()))
    number = tf.data.experimental.assert_cardinality(2 + job.rank())
    trainer.fit(batches.apply(number), verbose=0)


def checkpoints():
    """Return actions with checkpoints; each leaves the one that there is as it is."""
    folder = pathlib.Path(tempfile.gettempdir()) / f"wrong-{os.getppid()}"
    folder = pathlib.Path(from_chief(lambda: str(folder), "folder"))
    trainer = dtransformer.trainers.Trainer(jobs.translation_model())
    trainer.compile("adam")
    trainer.save(folder / "good")
    write = writer.write_shards

    def file_that_cannot_be_written():
        def fail(save):
            if job.rank() == 1:
                raise OSError("no space is left")
            return write(save)

        writer.write_shards = fail
        try:
            trainer.save(folder / "good")
        finally:
            writer.write_shards = write

    def folder_that_cannot_be_made():
        trainer.save(folder / "good" / "checkpoint.json" / "one")

    def lost_file():
        file = folder / "good" / "state.data-00001-of-00002"
        if job.is_chief():
            file.rename(folder / "lost")
        job.barrier()
        try:
            trainer.restore(folder / "good")
        finally:
            job.barrier()
            if job.is_chief():
                (folder / "lost").rename(file)
            job.barrier()

    def other_network():
        other = dtransformer.trainers.Trainer(jobs.translation_model(hidden_size=32))
        other.compile("adam")
        other.restore(folder / "good")

    def all_is_well():
        trainer.restore(folder / "good")
        if job.is_chief():
            shutil.rmtree(folder)
        raise ValueError("in the end")

    return (
        *(file_that_cannot_be_written, folder_that_cannot_be_made, lost_file),
        *(other_network, all_is_well),
    )


def main():
    dtransformer.init()
    actions = different_configs, different_seeds, wrong_product, different_numbers_of_batches
    for action in (*actions, *checkpoints()):
        try:
            action()
        except ValueError as error:
            print(f"{action.__name__}: {error}", flush=True)
    job.barrier()


if __name__ == "__main__":
    main()
