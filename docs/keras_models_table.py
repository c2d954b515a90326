"""Write the table of docs/keras-models.md: the share of parameters that tensor parallelism shards.

    pip install keras-hub
    python docs/keras_models_table.py

The models are created with shapes only. Their sizes are published sizes.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import keras

from dtransformer.parallel.config.config import TransformerOpParallelConfig
from dtransformer.parallel.keras_layers.layouts import weight_layouts
from dtransformer.parallel.variable_factory import shapes_alone
from harness.keras_networks import gpt, vit

PAGE = pathlib.Path(__file__).with_name("keras-models.md")
BEGIN = "<!-- Written by docs/keras_models_table.py. -->\n"
END = "<!-- End of the written part. -->\n"
DEGREES = (2, 4, 8)


def _hub(name, **sizes):
    """Return a function that creates a backbone of KerasHub."""

    def make():
        import keras_hub  # An optional package.

        return getattr(keras_hub.models, name)(**sizes)

    return make


_BASE = {"num_layers": 12, "num_heads": 12, "hidden_dim": 768, "intermediate_dim": 3072}
MODELS = {
    "functional GPT of `keras.layers`, tiny": gpt,
    "functional ViT of `keras.layers`, tiny": vit,
    "`keras.applications.ResNet50`": lambda: keras.applications.ResNet50(weights=None),
    "KerasHub Llama 2, 7B": _hub(
        "LlamaBackbone",
        vocabulary_size=32_000,
        num_layers=32,
        num_query_heads=32,
        num_key_value_heads=32,
        hidden_dim=4096,
        intermediate_dim=11_008,
    ),
    "KerasHub Gemma, 2B": _hub(
        "GemmaBackbone",
        vocabulary_size=256_000,
        num_layers=18,
        num_query_heads=8,
        num_key_value_heads=1,
        hidden_dim=2048,
        intermediate_dim=32_768,
        head_dim=256,
    ),
    "KerasHub GPT-2, base": _hub("GPT2Backbone", vocabulary_size=50_257, **_BASE),
    "KerasHub BERT, base": _hub("BertBackbone", vocabulary_size=30_522, **_BASE),
}


def row_of(title):
    """Return the row of a model in the table, as a line."""
    with shapes_alone():
        network = MODELS[title]()
    cells = []
    for degree in DEGREES:
        config = TransformerOpParallelConfig(model_parallel=degree)
        layouts = weight_layouts(network, config, {"model": degree})
        total = sum(layout.num_elements for layout in layouts)
        sharded = sum(layout.num_elements for layout in layouts if layout.is_sharded)
        cells.append(f"{sharded / total:.1%}")
    return f"| {title} | {total:,} | {' | '.join(cells)} |"


def table():
    """Return the table with its markers."""
    degrees = " | ".join(f"`model_parallel={degree}`" for degree in DEGREES)
    lines = [
        f"| model | parameters | {degrees} |",
        f"|{'---|' * (2 + len(DEGREES))}",
        *map(row_of, MODELS),
    ]
    return "\n".join([BEGIN, *lines, "", END])


def main():
    """Replace the table in the page."""
    text = PAGE.read_text("utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(before + table() + after, "utf-8")


if __name__ == "__main__":
    main()
