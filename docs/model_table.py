"""Write the table of families in docs/models.md, from the tables that the tests run.

    python -m docs.model_table

A test compares the page with the code. A family of `FAMILIES` is a row by itself.
"""

import pathlib
import re

from dtransformer.architectures import ARCHITECTURES
from dtransformer.models.pretrained.families import FAMILIES
from dtransformer.models.pretrained.families.task_heads import WITH_VECTORS, task_heads
from tests.distributed.parity_runs import RUNS
from tests.models.pretrained.family_rows import ADAPTERS, FORM_OF, PRESETS_OF
from tests.models.pretrained.published import FAMILY_OF

PAGE = pathlib.Path(__file__).with_name("models.md")
BEGIN, END = "<!-- Written by docs/model_table.py. -->\n", "<!-- End of what it writes. -->\n"
HEAD = """| family | class | loaded and saved | sizes from scratch | adapters | heads | layouts |
|---|---|---|---|---|---|---|
"""
# The form of the harness that has a family's blocks, where `FORM_OF` does not say.
FORMS = {"CausalLM": "llama", "MaskedLM": "bert", "EncoderDecoderLM": "bart"}


def presets(kind):
    """Return the names of the presets of a family."""
    return [x for x in ARCHITECTURES if re.match(PRESETS_OF.get(kind, f"{kind}_"), x)]


def layouts(form):
    """Return how many layouts a form of the harness is trained on by the tests."""
    networks = [run.partition("/")[0].partition(".")[0] for run in RUNS]
    return sum(re.sub("^(deep_)?(long_)?|_frozen$|_lora$", "", name) == form for name in networks)


def row(kind, family):
    """Return the cells of a family."""
    checked = [name for name, of in FAMILY_OF.items() if of == kind]
    form = FORM_OF.get(kind) or FORMS[family.network.__name__]
    heads = [x.removeprefix("For") for x in task_heads(kind)]
    heads += ["vectors"] * (kind in WITH_VECTORS)
    return (
        f"`{kind}`",
        f"`{family.architecture}`",
        f"{len(checked)} checked" if checked else "no check",
        ", ".join(f"`{x}`" for x in presets(kind)) or "by arguments",
        "checked with `peft`" if any(x in ADAPTERS for x in checked) else "yes",
        ", ".join(heads),
        f"{layouts(form)}, as `{form}`",
    )


def table():
    """Return the table's text."""
    rows = [f"| {' | '.join(row(*one))} |\n" for one in FAMILIES.items()]
    return HEAD + "".join(rows)


def page():
    """Return the page's text with the table anew."""
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
