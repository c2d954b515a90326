"""`dtransformer generate`: generate texts for prompts with a published model or a run."""

import argparse
import json

from dtransformer.datasets.documents import join_documents
from dtransformer.datasets.tool_calls import tools_in
from dtransformer.errors import InputError, raise_as_input_error, short_repr
from dtransformer.inputs.text import STANDARD_INPUT, read_input_lines
from dtransformer.models.generation.rules import end_ids
from dtransformer.models.generation.text_generator import TextGenerator
from dtransformer.parallel.collectives.objects import from_chief
from dtransformer.parallel.runtime import job
from dtransformer.runs.config import load_config
from dtransformer.runs.loading import opened, start_job

# Options of a config that `--set` accepts: the layout and the compute type.
_SETTINGS = ("parallel.", "training.local_devices", "training.precision")
# Options that are also arguments of `TextGenerator`.
_GENERATOR_OPTIONS = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "no_repeat_ngram_size"),
    *("min_new_tokens", "beam_size", "length_penalty", "num_return_sequences", "seed"),
)


def generate(arguments: argparse.Namespace) -> None:
    """Generate texts for prompts on all ranks. Rank 0 prints them.

    Raises:
        InputError: If the folder, a setting or an option is unusable, or no prompt is given.
    """
    config = _load_config(arguments.set)
    folder = arguments.model
    start_job(config)
    for name in ("system", "tools"):
        if getattr(arguments, name) is not None and not arguments.chat:
            raise InputError(f"--{name} requires --chat. Add --chat, or remove --{name}.")
    prompts = inputs = from_chief(
        lambda: arguments.prompt or _read_prompts(arguments.boundary), "generate/prompts"
    )
    tokenizer, model = opened(folder, config.training.precision, arguments.adapters)
    if arguments.chat:
        has_system = arguments.system is not None  # "" disables the template's default.
        first = [{"role": "system", "content": arguments.system}] if has_system else []
        turns = [[*first, {"role": "user", "content": prompt}] for prompt in prompts]
        tools = tools_in(arguments.tools)
        prompts = [tokenizer.chat(messages, tools) for messages in turns]
    values = {name: getattr(arguments, name) for name in _GENERATOR_OPTIONS}
    options = {name: value for name, value in values.items() if value is not None}
    with raise_as_input_error(kinds=ValueError):
        generator = _generator(model, tokenizer, arguments.max_new_tokens, arguments.stop, options)
        if not arguments.stream:
            return _print_texts(inputs, generator(prompts), arguments.json)
    if arguments.json or generator.num_results > 1:
        raise InputError(
            "--stream prints one text per prompt as it is generated. Remove --json and "
            "--num-return-sequences."
        )

    def show(_, text):
        if job.is_chief():
            print(text, end="", flush=True)

    for prompt in prompts:
        with raise_as_input_error(kinds=ValueError):
            generator([prompt], show)
        show(None, "\n")
    return None


def _load_config(settings):
    for setting in settings:
        if not setting.startswith(_SETTINGS):
            raise InputError(
                f"--set {short_repr(setting)} has no effect here. Use it with parallel.…, "
                "training.local_devices or training.precision."
            )
    return load_config(None, settings)


def _read_prompts(boundary):
    """Return the prompts in standard input. `boundary` is "line", "blank_line" or "file"."""
    lines = read_input_lines("Write prompts to it, or add --prompt.")
    if not lines:
        raise InputError("No prompt was given. Add --prompt, or write lines to standard input.")
    if boundary == "line":
        return lines
    return list(join_documents(enumerate(lines, start=1), boundary, STANDARD_INPUT))


def _generator(model, tokenizer, max_new_tokens, stops, options):
    stop_ids = end_ids(model, tokenizer)
    for text in stops:
        ids = tokenizer.encode_stop(text)
        if len(ids) != 1:
            raise InputError(
                f"--stop {short_repr(text)} has {len(ids)} tokens. Choose a text that is a single token."
            )
        stop_ids += ids
    return TextGenerator(model, tokenizer, max_new_tokens, stop_ids=stop_ids, **options)


def _print_texts(prompts, texts, as_json):
    per_prompt = len(texts) // len(prompts)
    for index, text in enumerate(texts if job.is_chief() else ()):
        record = {"prompt": prompts[index // per_prompt], "text": text}
        print(json.dumps(record, ensure_ascii=False) if as_json else text)
