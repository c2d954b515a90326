"""Train a language model from scratch: a GPT that writes, or a BERT that fills in.

    python examples/language_model/embedded_text.py --out data/lm
    dtransformer prepare --lm --input data/lm/train.txt --sentences --train-tokenizer 512 \\
        --out data/lm/train
    dtransformer prepare --lm --input data/lm/dev.txt --sentences --tokenizer data/lm/train/tokenizer \\
        --out data/lm/dev
    python examples/language_model/train.py --config examples/language_model/gpt.yaml
    python examples/language_model/train.py --config examples/language_model/bert.yaml
    python examples/language_model/train.py --config examples/language_model/experts.yaml
    horovodrun -np 4 python examples/language_model/train.py --model_parallel 2

Files of your own go the same way. The run's folder gets checkpoints, metrics.jsonl, and a picture
of the losses where matplotlib is there; the same command with --resume goes on where it stood. What
the GPT has learnt is in its folder `model`, for `dtransformer generate --model`.
"""

import argparse
import math
import pathlib
import sys

import keras
import yaml

import dtransformer
from dtransformer.datasets import (
    LanguageModelBatches,
    NextSentenceBatches,
    TokenShards,
    load_tokenizer,
)
from dtransformer.errors import InputError
from dtransformer.layers import CrossEntropyLoss
from dtransformer.models import CausalLM, MaskedLM, save_pretrained
from dtransformer.reports import draw_losses
from dtransformer.trainers import ModelCheckpoint, Trainer, lr_schedules
from dtransformer.trainers.callbacks import MetricsFile, StepTimer

HERE = pathlib.Path(__file__).parent


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default=HERE / "gpt.yaml", type=pathlib.Path)
    parser.add_argument("--run", type=pathlib.Path, help="a folder; runs/NAME-OF-THE-CONFIG")
    parser.add_argument("--epochs", type=int, help="instead of the config's")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    parser.add_argument(  # horovodrun takes a --mp for its own --mpi: spell it out there
        "--model_parallel", "--mp", type=int, default=1, dest="mp", help="shards of each operation"
    )
    parser.add_argument(
        "--expert_parallel", "--ep", type=int, default=1, dest="ep", help="shards of the experts"
    )
    parser.add_argument("--local_devices", type=int, default=1, help="devices of each rank")
    args = parser.parse_args()
    args.run = args.run or pathlib.Path("runs") / args.config.stem
    return args


def gpt(shards, model):
    """A decoder that predicts each next token."""
    network = CausalLM(shards.vocab_size, **shard_ids(shards), **model)
    return network, CrossEntropyLoss(ignore_id=-100), LanguageModelBatches


def bert(shards, model):
    """An encoder that finds masked tokens, and tells whether a sentence follows another."""
    network = MaskedLM(
        shards.vocab_size + ("mask" not in shards.special_ids),
        pad_id=shards.special_ids.get("pad"),
        next_sentence=True,
        **model,
    )
    loss = {name: CrossEntropyLoss(ignore_id=-100) for name in ("masked_lm", "next_sentence")}
    return network, loss, NextSentenceBatches


def shard_ids(shards):
    return {f"{name}_id": shards.special_ids.get(name) for name in ("pad", "start", "end")}


def main():
    args = parse_arguments()
    config = yaml.safe_load(args.config.read_text(encoding="utf-8"))
    data, training = config["data"], config["training"]
    dtransformer.init(
        dtransformer.TransformerOpParallelConfig(model_parallel=args.mp, expert_parallel=args.ep),
        seed=training["seed"],
        local_devices=args.local_devices,
    )
    shards, held_out = TokenShards(data["train"]), TokenShards(data["dev"])
    network, loss, make_batches = {"gpt": gpt, "bert": bert}[config["kind"]](
        shards, {**config["model"], "max_length": data["length"]}
    )
    index, count = dtransformer.data_shard()
    options = {
        "length": data["length"],
        "batch_size": data["batch_size"],
        "seed": training["seed"],
        "shard_index": index,
        "num_shards": count,
        "pad_rows_to_multiple_of": dtransformer.rows_multiple_of(),
    }
    batches = make_batches(shards, **options)
    dev_batches = make_batches(held_out, training=False, **options)

    epochs = args.epochs or training["epochs"]
    total_steps = epochs * len(batches)
    schedule = lr_schedules.get(
        "cosine",
        peak_learning_rate=training["learning_rate"],
        warmup_steps=min(training["warmup_steps"], total_steps // 2),
        total_steps=total_steps,
    )
    optimizer = keras.optimizers.AdamW(
        schedule, weight_decay=training["weight_decay"], beta_2=0.95, global_clipnorm=1.0
    )
    optimizer.exclude_from_weight_decay(var_names=["gamma", "beta", "bias"])
    network.build()
    trainer = Trainer(network)
    trainer.compile(optimizer, loss)
    trainer.summary()

    callbacks = [StepTimer(), ModelCheckpoint(args.run / "checkpoints")]
    if dtransformer.is_chief():
        callbacks.append(MetricsFile(args.run / "metrics.jsonl"))
    trainer.fit(
        batches,
        epochs=epochs,
        validation_data=dev_batches,
        callbacks=callbacks,
        resume=args.resume,
        verbose=2,
    )
    if config["kind"] == "gpt":
        loss = trainer.evaluate(dev_batches, verbose=0, return_dict=True)["loss"]
        if dtransformer.is_chief():
            print(f"Perplexity on held-out text: {math.exp(loss):.2f}")
        tokenizer = load_tokenizer(shards.tokenizer_folder)
        write_some(network, tokenizer, config["prompts"])
        if config.get("family", "gpt2"):
            save(network, tokenizer, args.run / "model")
        else:
            report_experts(trainer, args.run / "experts.png")
    if dtransformer.is_chief():
        try:
            draw_losses(args.run / "metrics.jsonl", args.run / "losses.png")
        except ImportError as error:
            print(error)


def write_some(network, tokenizer, prompts):
    """Print how the network goes on from prompts, drawn by chance; all ranks have to call."""
    ids = [[tokenizer.start_id, *tokenizer.encode([text])[0].numpy()] for text in prompts]
    texts = network.generate(ids, max_new_tokens=24, temperature=0.8, top_k=40, seed=1)
    for prompt, text in zip(prompts, tokenizer.decode(texts), strict=True):
        if dtransformer.is_chief():
            print(f"{prompt} … {text}")


def report_experts(trainer, picture):
    """Print how tokens were spread over the experts in the last epoch, and draw it."""
    load = trainer.expert_load()
    if dtransformer.is_chief():
        print(load)
        load.write(picture)


def save(network, tokenizer, folder):
    """Write a folder that `dtransformer generate` and `transformers` load; all ranks have to call."""
    # A run that is resumed replaces what is there.
    save_pretrained(network, folder, family="gpt2", overwrite=True, tokenizer=tokenizer)


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        sys.exit(f"train.py: {error}")
