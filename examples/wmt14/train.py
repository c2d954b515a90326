"""Train French to English on newstest2014, with the rules of the published sample or modern ones.

    python examples/wmt14/train.py --faithful --epochs 4
    dtransformer launch -np 4 -- python examples/wmt14/train.py --model_parallel 2
    dtransformer launch -np 2 -- python examples/wmt14/train.py --encoder_layer 2 --decoder_layer 2 \\
        --pipeline_stage 2 --micro_batch_num 4 --model_parallel 2 --local_devices 2

See examples/wmt14/cluster.sh for two hosts and examples/wmt14/save_and_recover.sh for
checkpoints.

`--faithful` follows the sample's data rules: words separated by white space, no start token,
fixed lengths, no shuffling. The default uses subwords, start and end tokens, masks, length
buckets and shuffling. Only the config sets the parallel layout.
"""

import argparse
import sys

import dtransformer  # isort: skip  (before TensorFlow, to enable oneDNN)

import keras
import tensorflow as tf
from faithful import EOT, PAD, faithful_examples

from dtransformer.datasets import (
    LengthBuckets,
    SpecialTokenIds,
    SubwordTokenizer,
    TranslationBatches,
    read_tsv,
)
from dtransformer.errors import InputError
from dtransformer.layers import CrossEntropyLoss
from dtransformer.models import TranslationTransformer
from dtransformer.trainers import ModelCheckpoint, Trainer
from dtransformer.trainers.callbacks import LossMonitor


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data", default="data/wmt14/wmt14.fr_en.txt", help="output of preprocess.py"
    )
    parser.add_argument("--faithful", action="store_true", help="the sample's data rules")
    parser.add_argument("--src_len", type=int, default=10, help="words per source (faithful)")
    parser.add_argument("--tgt_len", type=int, default=10, help="words per target (faithful)")
    parser.add_argument(
        "--vocab_size", type=int, help="default: 20000 words (faithful) or 4000 subwords"
    )
    parser.add_argument("--d_model", type=int, default=128)
    parser.add_argument("--encoder_layer", type=int, default=1)
    parser.add_argument("--decoder_layer", type=int, default=1)
    parser.add_argument("--batch_size", type=int, default=32, help="sentences per global batch")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument(  # horovodrun reads --mp as its option --mpi. Use the long form there.
        "--model_parallel", "--mp", type=int, default=1, dest="mp", help="shards of each operation"
    )
    parser.add_argument("--local_devices", type=int, default=1, help="devices per rank")
    parser.add_argument("--pipeline_stage", type=int, default=1, help="number of pipeline stages")
    parser.add_argument("--micro_batch_num", type=int, default=1, help="micro-batches per batch")
    parser.add_argument("--save_timeline", help=".json file for the timeline of the last step")
    parser.add_argument("--checkpoints", help="folder for one checkpoint per epoch")
    parser.add_argument("--save_steps", type=int, help="also save every n steps")
    parser.add_argument(
        "--replicas", action="store_true", help="write a second copy of files if possible"
    )
    parser.add_argument(
        "--resume", action="store_true", help="resume from the newest checkpoint, if any"
    )
    args = parser.parse_args()
    args.vocab_size = args.vocab_size or (20000 if args.faithful else 4000)
    return args


def faithful_data(args):
    """Return the sample's fixed-length batches in file order, with the local rows of each."""
    examples = faithful_examples(args.data, args.src_len, args.tgt_len, args.vocab_size)
    inputs = {"source": examples.source, "target": examples.target}
    dataset = tf.data.Dataset.from_tensor_slices((inputs, examples.label))
    dataset = dataset.batch(args.batch_size, drop_remainder=True)
    if dtransformer.is_chief():
        print(f"{len(examples.source):,} pairs, {len(dataset)} steps per epoch")
    index, count = dtransformer.data_shard()

    def rows(*batch):
        return tf.nest.map_structure(lambda x: x[index::count], batch)

    special = {"pad_id": PAD, "start_id": PAD, "end_id": EOT}
    return dataset.map(rows).cache().prefetch(1), special, args.vocab_size, {}


def modern_data(args):
    """Return shuffled batches of subwords. Sentences of a batch have similar lengths."""
    sources, targets = read_tsv(args.data)
    tokenizer = SubwordTokenizer.train([*sources, *targets], args.vocab_size)
    special = {name: getattr(tokenizer, name) for name in ("pad_id", "start_id", "end_id")}
    index, count = dtransformer.data_shard()
    batches = TranslationBatches(
        tokenizer.encode(sources),
        tokenizer.encode(targets),
        batch_size=args.batch_size,
        max_length=128,
        buckets=LengthBuckets(
            pad_to_bounds=dtransformer.compiles_shapes(), pad_to_multiple_of=args.mp
        ),
        pad_rows_to_multiple_of=dtransformer.row_multiple(),
        shard_index=index,
        num_shards=count,
        special_ids=SpecialTokenIds(**special),
    )
    return batches, special, tokenizer.vocab_size, {"tokenizer": tokenizer}


def main():
    args = parse_arguments()
    dtransformer.init(
        dtransformer.TransformerOpParallelConfig(
            model_parallel=args.mp,
            pipeline_stage=args.pipeline_stage,
            micro_batch_num=args.micro_batch_num,
        ),
        local_devices=args.local_devices,
    )
    make_data = faithful_data if args.faithful else modern_data
    data, special, vocab_size, assets = make_data(args)
    model = TranslationTransformer(
        vocab_size,
        hidden_size=args.d_model,
        num_heads=8,
        ffn_hidden_size=args.d_model,
        encoder_layers=args.encoder_layer,
        decoder_layers=args.decoder_layer,
        dropout_rate=0.0,
        embedding_dropout_rate=0.1,
        positions="learned",
        max_source_length=args.src_len if args.faithful else 128,
        max_target_length=args.tgt_len if args.faithful else 129,
        post_layernorm_residual=True,
        **special,
    )
    model.build()
    optimizer = keras.optimizers.AdamW(args.lr, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["gamma", "beta", "bias"])

    trainer = Trainer(model)
    trainer.compile(optimizer, CrossEntropyLoss(ignore_id=special["pad_id"]))
    trainer.summary()
    callbacks = [LossMonitor(every=20)]
    if args.checkpoints:
        callbacks.append(
            ModelCheckpoint(
                args.checkpoints,
                every_steps=args.save_steps,
                replicas=args.replicas,
                assets=assets,
            )
        )
    trainer.fit(
        data, epochs=args.epochs, verbose=2, callbacks=callbacks, resume=args.resume, shard=False
    )
    if args.save_timeline:
        trainer.timeline(args.save_timeline)


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        sys.exit(f"train.py: {error}")
