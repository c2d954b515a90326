"""`dtransformer generate`: texts of a published model, which go on with prompts or are for them."""

import argparse
import json
import os
import pathlib
import sys
from collections.abc import Iterable
from typing import BinaryIO, TextIO

import keras

import dtransformer
from dtransformer.datasets.documents import joined
from dtransformer.datasets.tokenizer_folder import load_tokenizer
from dtransformer.errors import InputError, shown
from dtransformer.inputs.files import read_limited
from dtransformer.inputs.text import decode_lines
from dtransformer.models import from_pretrained, load_lora
from dtransformer.models.generation.text_generator import TextGenerator
from dtransformer.parallel.collectives.objects import from_chief
from dtransformer.parallel.runtime import job
from dtransformer.runs import needs
from dtransformer.runs.config import load_config
from dtransformer.runs.loading import is_run, load_run

# What of a config counts here: how the work is divided, and the type to compute in.
_SETTINGS = ("parallel.", "training.local_devices", "training.precision")
# Options that a `TextGenerator` takes by these names.
_OF_GENERATOR = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "no_repeat_ngram_size"),
    *("min_new_tokens", "beam_size", "length_penalty", "num_return_sequences", "seed"),
)


def generate(
    folder: str | os.PathLike,
    source: BinaryIO | None,
    destination: TextIO,
    prompts: list[str] | None = None,
    settings: Iterable[str] = (),
    max_new_tokens: int = 64,
    stops: Iterable[str] = (),
    streams: bool = False,
    as_json: bool = False,
    *,
    adapters: str | os.PathLike | None = None,
    boundary: str = "line",
    is_chat: bool = False,
    system: str | None = None,
    **options,
) -> None:
    """Generate texts for prompts, and write them; on every rank, of which rank 0 writes.

    Args:
        folder: a folder with a published model and its tokenizer.
        source: a binary stream of the prompts, where none are given.
        destination: a text stream.
        prompts: the prompts.
        settings: texts "section.key=value" of a run's config, of its section `parallel`, and
            `training.local_devices` and `training.precision`.
        max_new_tokens: most tokens of a continuation.
        stops: texts of one token each that end a continuation, besides the model's own.
        streams: whether each token is written as soon as it is found.
        as_json: whether each result is a line of JSON.
        adapters: a folder of low-rank adapters, or None.
        boundary: what ends a prompt of the stream: "line", "blank_line" or "file".
        is_chat: whether prompts are messages of a user, put into the tokenizer's chat template.
        system: with `is_chat` the message before each of them, or None.
        **options: those of `GenerationOptions`.

    Raises:
        InputError: the folder, a setting or an option is not usable, or there is no prompt.
    """
    config = _config(settings)
    try:
        dtransformer.init(
            config.parallel, seed=config.training.seed, local_devices=config.training.local_devices
        )
    except ValueError as error:
        raise InputError(f"parallel: {error}") from None
    if system is not None and not is_chat:
        raise InputError("--system goes with --chat only: add it, or leave it out")
    prompts = from_chief(lambda: prompts or _read(source, boundary), "generate/prompts")
    tokenizer, model = opened(folder, config.training.precision, adapters)
    given = prompts
    if is_chat:
        prompts = [_in_chat(tokenizer, folder, system, prompt) for prompt in prompts]
    generator = _generator(model, tokenizer, max_new_tokens, stops, options)
    shows = job.is_chief()
    if not streams:
        _write(destination if shows else None, given, _continued(generator, prompts), as_json)
        return
    if as_json or generator.num_results > 1:
        raise InputError("--stream shows one text as it is found: leave --json and several out")
    for prompt in prompts:
        show = lambda _, text: print(text, end="", flush=True, file=destination)
        _continued(generator, [prompt], show if shows else _nothing)
        if shows:
            print(file=destination)


def _config(settings):
    for setting in settings:
        if not setting.startswith(_SETTINGS):
            raise InputError(
                f"--set {shown(setting)}: only parallel.…, training.local_devices and "
                "training.precision count here"
            )
    return load_config(None, settings)


def _in_chat(tokenizer, folder, system, prompt):
    """Return a user's message in the tokenizer's chat template."""
    if not hasattr(tokenizer, "chat"):
        raise InputError(f"{folder}: its tokenizer has no chat template")
    first = [] if system is None else [{"role": "system", "content": system}]
    return tokenizer.chat([*first, {"role": "user", "content": prompt}])


def _read(source, boundary):
    """Return the prompts of a stream."""
    if source is None:
        raise InputError("standard input is closed: give the prompts in lines, or a --prompt")
    lines = decode_lines(read_limited(source, "standard input"), "standard input")
    if not lines:
        raise InputError("there is no prompt: give a --prompt, or lines of standard input")
    if boundary == "line":
        return lines
    return list(joined(enumerate(lines, start=1), boundary, "standard input"))


def opened(
    folder: str | os.PathLike, precision: str, adapters: str | os.PathLike | None = None
) -> tuple[object, keras.Model]:
    """Return the tokenizer and the network of a published folder, or of a run's.

    Args:
        folder: its path.
        precision: the type to compute in.
        adapters: a folder of low-rank adapters, or None.

    Raises:
        InputError: the folder is not usable, or what it holds generates no texts.
    """
    folder = pathlib.Path(folder)
    if is_run(folder):
        run = load_run(folder, precision)
        if run.config.task == "translation":
            raise InputError(
                f"{folder}: is the run of a translation model: dtransformer translate --run {folder}"
            )
        tokenizer, model = run.tokenizer, run.network
    else:
        tokenizer = load_tokenizer(folder)
        needs.check_published(folder, job.size())
        model = from_pretrained(folder, dtype=precision)
    if not hasattr(model, "generate") or getattr(model, "has_task_head", False):
        raise InputError(f"{folder}: holds a {type(model).__name__}, which generates no texts")
    if tokenizer.vocab_size > model.vocab_size:
        raise InputError(
            f"{folder}: the tokenizer has {tokenizer.vocab_size} ids, but the model "
            f"{model.vocab_size}: are the files of one model?"
        )
    if adapters is not None:
        load_lora(model, adapters)
    return tokenizer, model


def _generator(model, tokenizer, max_new_tokens, stops, options):
    stop_ids = list(getattr(tokenizer, "stop_ids", ()))
    if not stop_ids and model.end_id is not None:
        stop_ids = [model.end_id]
    for text in stops:
        if hasattr(tokenizer, "ids_of_stop"):
            ids = tokenizer.ids_of_stop(text)
        else:
            ids = tokenizer.encode([text]).to_list()[0]
        if len(ids) != 1:
            raise InputError(
                f"--stop {shown(text)}: is {len(ids)} tokens: give a text of one token"
            )
        stop_ids += ids
    try:
        return TextGenerator(model, tokenizer, max_new_tokens, stop_ids=stop_ids, **options)
    except ValueError as error:
        raise InputError(str(error)) from None


def _continued(generator, prompts, on_text=None):
    try:
        return generator(prompts, on_text)
    except ValueError as error:
        raise InputError(str(error)) from None


def _write(destination, prompts, texts, as_json):
    if destination is None:
        return
    each = len(texts) // len(prompts)
    for number, text in enumerate(texts):
        record = {"prompt": prompts[number // each], "text": text}
        print(json.dumps(record, ensure_ascii=False) if as_json else text, file=destination)


def _nothing(number, text):
    """Take a part of a text that another rank shows."""


def run_generate(arguments: argparse.Namespace) -> None:
    """Run the command as its options say; errors as of `generate`."""
    given = {name: getattr(arguments, name) for name in _OF_GENERATOR}
    generate(
        arguments.model,
        None if sys.stdin is None else sys.stdin.buffer,
        sys.stdout,
        arguments.prompt,
        arguments.set,
        arguments.max_new_tokens,
        arguments.stop,
        arguments.stream,
        arguments.json,
        adapters=arguments.adapters,
        boundary=arguments.boundary,
        is_chat=arguments.chat,
        system=arguments.system,
        **{name: value for name, value in given.items() if value is not None},
    )
