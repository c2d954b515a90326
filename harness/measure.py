"""Network for benchmarks, and measurements of a step's memory."""

import pathlib
import resource


def translation_trainer(vocab_size, hidden_size, layers):
    """Return a compiled `Trainer` for an encoder-decoder with `layers` blocks in each stack."""
    import keras  # The import is local because the launching process does not need Keras.

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
    """Return the peak of temporary memory in a step, by TensorFlow's allocator, or `None` if unknown."""
    import tensorflow as tf

    try:
        tf.config.experimental.reset_memory_stats("CPU:0")
        step()
        info = tf.config.experimental.get_memory_info("CPU:0")
    except ValueError:  # TensorFlow's CPU allocator has statistics only with oneDNN.
        return None
    return info["peak"] - info["current"]


def elements_sent(trainer):
    """Return the number of elements that this rank sends to data-parallel ranks per step.

    Sums of a tied table over pipeline stages have the table's path and do not count.
    """
    paths = {weight.path for weight in trainer.network.variables}
    collectives = trainer.communication_report().collectives
    return sum(
        c.elements_sent
        for c in collectives
        if c.over == "ranks" and not (c.kind == "all-reduce" and c.layer in paths)
    )


def limit_memory(num_bytes):
    """Limit this process to `num_bytes` more memory than it uses now."""
    status = pathlib.Path("/proc/self/status").read_text()
    kilobytes = next(line for line in status.splitlines() if line.startswith("VmData")).split()[1]
    limit = int(kilobytes) * 1024 + num_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def peak_bytes():
    """Return the peak resident memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
