"""Does on every rank what has to end in an error, and prints each: a program that tests launch."""

import tensorflow as tf

import dtransformer
import dtransformer.trainers
from dtransformer.parallel import runtime
from tests.distributed import jobs


def different_configs():
    groups = 4 + runtime.rank()
    dtransformer.init(dtransformer.TransformerOpParallelConfig(gradient_aggregation_group=groups))


def different_seeds():
    dtransformer.init(seed=runtime.rank())


def wrong_product():
    dtransformer.init(dtransformer.TransformerOpParallelConfig(data_parallel=3))


def different_numbers_of_batches():
    trainer = dtransformer.trainers.Trainer(jobs.translation_model())
    trainer.compile()
    batches = jobs.share(jobs.global_batches(2 + runtime.rank()))
    number = tf.data.experimental.assert_cardinality(2 + runtime.rank())
    trainer.fit(batches.apply(number), verbose=0)


if __name__ == "__main__":
    dtransformer.init()
    for action in (different_configs, different_seeds, wrong_product, different_numbers_of_batches):
        try:
            action()
        except ValueError as error:
            print(f"{action.__name__}: {error}", flush=True)
    runtime.barrier()
