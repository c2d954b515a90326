"""Train a T5 from scratch: every task is text that becomes text, here a translation.

    dtransformer prepare --embedded --out data/embedded
    python examples/t5/train.py
    horovodrun -np 4 python examples/t5/train.py --model_parallel 2 --pipeline_stage 2

Sentences of your own go the same way: a folder with train.en.sgm, train.fr.sgm and the same of dev.
Sources begin with what is asked for, as T5's do. The run's folder gets metrics.jsonl, a picture of
the losses where matplotlib is there, and the network in the folder `model`, as `transformers` has
it.
"""

import argparse
import pathlib
import sys

import keras
import yaml

import dtransformer
from dtransformer.datasets import SubwordTokenizer, TranslationBatches, read_pairs
from dtransformer.errors import InputError
from dtransformer.layers import CrossEntropyLoss
from dtransformer.models import EncoderDecoderLM, save_pretrained
from dtransformer.reports import draw_losses
from dtransformer.trainers import Trainer, lr_schedules
from dtransformer.trainers.callbacks import MetricsFile, SacreBleu, StepTimer

HERE = pathlib.Path(__file__).parent
TASK = "translate English to French: "
T5 = {  # version 1.1
    "positions": "relative",
    "norm": "rms_norm",
    "use_bias": False,
    "post_layernorm_residual": False,
    "gated": True,
    "hidden_act": "gelu_tanh",
    "tied_head": False,
    "query_scale": 1.0,
}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default=HERE / "embedded.yaml", type=pathlib.Path)
    parser.add_argument("--run", default="runs/t5", type=pathlib.Path)
    parser.add_argument("--epochs", type=int, help="instead of the config's")
    parser.add_argument("--model_parallel", type=int, default=1, help="shards of each operation")
    parser.add_argument("--pipeline_stage", type=int, default=1, help="stages of the network")
    return parser.parse_args()


def pairs_of(folder, name):
    """Return sources, each with the task before it, and targets."""
    sources, targets = read_pairs(*(f"{folder}/{name}.{language}.sgm" for language in ("en", "fr")))
    return [TASK + text for text in sources], targets


def main():
    args = parse_arguments()
    config = yaml.safe_load(args.config.read_text(encoding="utf-8"))
    data, training = config["data"], config["training"]
    parallel = dtransformer.TransformerOpParallelConfig(
        model_parallel=args.model_parallel,
        pipeline_stage=args.pipeline_stage,
        micro_batch_num=2 * args.pipeline_stage if args.pipeline_stage > 1 else 1,
    )
    dtransformer.init(parallel, seed=training["seed"])
    pairs, dev_pairs = (pairs_of(data["folder"], name) for name in ("train", "dev"))
    tokenizer = SubwordTokenizer.train([*pairs[0], *pairs[1]], data["vocab_size"])
    # A T5 starts with the padding, which is never trained as a label.
    special = {"pad_id": tokenizer.pad_id, "start_id": tokenizer.pad_id, "end_id": tokenizer.end_id}
    index, count = dtransformer.data_shard()
    batches, dev_batches = (
        TranslationBatches(
            *map(tokenizer.encode, texts),
            batch_tokens=data["batch_tokens"],
            max_length=data["max_length"],
            pad_to_bucket=dtransformer.compiles_shapes(),
            pad_rows_to_multiple_of=dtransformer.rows_multiple_of(),
            shard_index=index,
            num_shards=count,
            training=is_training,
            **special,
        )
        for texts, is_training in ((pairs, True), (dev_pairs, False))
    )

    network = EncoderDecoderLM(tokenizer.vocab_size, **T5, **special, **config["model"])
    network.build()
    epochs = args.epochs or training["epochs"]
    schedule = lr_schedules.get(
        "cosine",
        peak_learning_rate=training["learning_rate"],
        warmup_steps=training["warmup_steps"],
        total_steps=epochs * len(batches),
    )
    trainer = Trainer(network)
    trainer.compile(
        keras.optimizers.AdamW(schedule, weight_decay=0.01, global_clipnorm=1.0),
        CrossEntropyLoss(ignore_id=tokenizer.pad_id),
    )
    trainer.summary()

    def translate(sources):
        ids = tokenizer.encode(sources).to_tensor(tokenizer.pad_id)
        return tokenizer.decode(network.generate(ids, max_length=data["max_length"]))

    bleu = SacreBleu(dev_pairs[0][:100], dev_pairs[1][:100], translate)
    callbacks = [StepTimer(), bleu]
    if dtransformer.is_chief():
        callbacks.append(MetricsFile(args.run / "metrics.jsonl"))
    trainer.fit(batches, epochs=epochs, validation_data=dev_batches, callbacks=callbacks, verbose=2)
    for source, text in zip(dev_pairs[0][:3], translate(dev_pairs[0][:3])):
        if dtransformer.is_chief():
            print(f"{source}\n    {text}")
    save_pretrained(network, args.run / "model", "t5", overwrite=True, tokenizer=tokenizer)
    if dtransformer.is_chief():
        try:
            draw_losses(args.run / "metrics.jsonl", args.run / "losses.png")
        except ImportError as error:
            print(error)


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        sys.exit(f"train.py: {error}")
