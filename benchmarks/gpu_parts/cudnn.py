"""cuDNN's attention on a card, beside the reference in float32: values and gradients of each mask."""

import numpy as np
import tensorflow as tf

from dtransformer.layers.attention_core import attention
from dtransformer.layers.attention_mask import Segments

_ROWS, _HEADS, _LENGTH = 2, 8, 512


def compare(smoke, **_):
    """Yield how far 16 bits are from the reference, by case: of the reference in 16 bits, too."""
    length = 32 if smoke else _LENGTH
    rows = tf.range(length)[None, :] < tf.constant([[length], [length // 3]])
    sequences = tf.cast(tf.range(length)[None, :] // (length // 4), "int32") + 1
    packed = Segments(*[tf.repeat(sequences, _ROWS, axis=0)] * 2)
    cases = {
        "all": {},
        "causal": {"causal": True},
        "window": {"causal": True, "window": length // 4},
        "padding": {"mask": rows},
        "causal padding": {"mask": rows, "causal": True},
        "packed": {"mask": packed, "causal": True},
        "packed window": {"mask": packed, "causal": True, "window": length // 8},
    }
    for dtype in ("bfloat16", "float16"):
        for size, heads in ((64, _HEADS), (128, _HEADS), (64, 2)):
            for name, options in cases.items():
                try:
                    apart = _apart(length, size, heads, dtype, options)
                except Exception as error:  # said, and the next is tried
                    apart = {"failed": str(error)[-300:]}
                yield {"case": name, "type": dtype, "size": size, "key_heads": heads, **apart}


def _apart(length, size, heads, dtype, options):
    draw = np.random.default_rng(0).normal
    shapes = [(_ROWS, n, length, size) for n in (_HEADS, heads, heads, _HEADS)]
    full = [tf.cast(tf.constant(draw(size=shape) / 4, "float32"), dtype) for shape in shapes]

    def computed(implementation, kind):
        @tf.function(autograph=False)
        def run(q, k, v, dy):
            with tf.GradientTape() as tape:
                tape.watch([q, k, v])
                y = attention(q, [k], [v], implementation=implementation, **options)
            return [y, *tape.gradient(y, [q, k, v], dy)]

        found = run(*[tf.cast(x, kind) for x in full])
        return [tf.cast(x, "float32").numpy() for x in found]

    expected = computed("reference", "float32")
    names = ("y", "dq", "dk", "dv")
    found = {}
    for implementation in ("cudnn", "reference"):
        pairs = zip(names, computed(implementation, dtype), expected)
        found[implementation] = {
            name: float(np.linalg.norm(x - e) / np.linalg.norm(e)) for name, x, e in pairs
        }
    return found
