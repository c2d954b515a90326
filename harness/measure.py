"""The network that benchmarks train, and the memory that a step takes."""

import pathlib
import resource


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


def elements_sent(trainer):
    """Return how many numbers this rank sends to data-parallel ranks in a step of a trainer."""
    sent = trainer.communication_report().collectives
    return sum(c.elements_sent for c in sent if c.over == "ranks")


def limit_memory(num_bytes):
    """Let this process take no more than so many bytes of memory besides what it has."""
    status = pathlib.Path("/proc/self/status").read_text()
    kilobytes = next(line for line in status.splitlines() if line.startswith("VmData")).split()[1]
    limit = int(kilobytes) * 1024 + num_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def peak_bytes():
    """Return the highest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
