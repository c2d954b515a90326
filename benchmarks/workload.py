"""What the benchmarks that start processes share: the model they train, and the start."""

import json
import pathlib
import resource
import subprocess
import sys


def translation_trainer(vocab_size, hidden_size, layers):
    """Return a compiled `Trainer` of an encoder-decoder with as many layers of each kind."""
    import keras  # not in the process that starts the others

    from dtransformer.layers import CrossEntropyLoss
    from dtransformer.models import TranslationTransformer
    from dtransformer.trainers import Trainer

    model = TranslationTransformer(
        vocab_size,
        hidden_size=hidden_size,
        num_heads=8,
        encoder_layers=layers,
        decoder_layers=layers,
    )
    trainer = Trainer(model)
    trainer.compile(keras.optimizers.AdamW(1e-4), CrossEntropyLoss(0.1))
    return trainer


def passing_bytes(step):
    """Return the peak of TensorFlow's allocator in a step, above what stays; None if unknown."""
    import tensorflow as tf

    try:
        tf.config.experimental.reset_memory_stats("CPU:0")
        step()
        info = tf.config.experimental.get_memory_info("CPU:0")
    except ValueError:  # it counts with oneDNN's operations only
        return None
    return info["peak"] - info["current"]


def peak_bytes():
    """Return the highest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def command_of(num_ranks, arguments):
    """Return the command that runs a Python program, on several ranks under horovodrun."""
    command = [sys.executable, *arguments]
    if num_ranks > 1:
        horovodrun = pathlib.Path(sys.executable).with_name("horovodrun")
        command = [str(horovodrun), "--gloo", "-np", str(num_ranks), *command]
    return command


def json_with(word, lines):
    """Return the JSON object of the first line that has a word; None without one."""
    line = next((line for line in lines if word in line), None)
    return None if line is None else json.loads(line[line.index("{") :])


def output_lines(name, command, timeout):
    """Return the lines that a command prints; end with its output where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    return done.stdout.splitlines()


def report_of(options, key, commands, word, timeout):
    """Run commands; return the options, and under a key what each has printed.

    Args:
        options: dict of the benchmark's options.
        key: str, under which the results are.
        commands: dict of names and commands.
        word: a word of the line in JSON that a command prints.
        timeout: seconds of each.
    """
    report = {"options": options, key: {}}
    for name, command in commands.items():
        report[key][name] = json_with(word, output_lines(name, command, timeout))
        print(name, report[key][name], file=sys.stderr)
    return report
