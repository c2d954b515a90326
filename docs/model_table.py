"""Write the table of families and the list of sizes in docs/models.md.

    python -m docs.model_table

A test compares the page with the code.
"""

import pathlib
import re

from dtransformer.architectures import ARCHITECTURES
from dtransformer.models.pretrained.families import FAMILIES
from dtransformer.models.pretrained.families.task_heads import WITH_VECTORS, task_heads
from tests.distributed.parity_runs import RUNS
from tests.models.pretrained.family_rows import ADAPTERS, NETWORK_FORMS, PRESET_PATTERNS
from tests.models.pretrained.published import MODEL_FAMILIES

PAGE = pathlib.Path(__file__).with_name("models.md")
BEGIN, END = "<!-- Written by docs/model_table.py. -->\n", "<!-- End of the written part. -->\n"
HEADER = """| family | class in `transformers` | heads | tested layouts |
|---|---|---|---|
"""
HEAD_NAMES = {"ForSequenceClassification": "sequence", "ForTokenClassification": "token"}
# Network in harness/networks.py with the blocks of a family that `NETWORK_FORMS` does not list.
DEFAULT_FORMS = {"CausalLM": "llama", "MaskedLM": "bert", "EncoderDecoderLM": "bart"}


def presets(family):
    """Return the names of the published sizes of a family."""
    pattern = PRESET_PATTERNS.get(family, f"{family}_")
    return [name for name in ARCHITECTURES if re.match(pattern, name)]


def models_in_tests(family):
    """Return the names of the models of a family that the tests compare with `transformers`."""
    return [name for name, model_family in MODEL_FAMILIES.items() if model_family == family]


def count_layouts(form):
    """Return the number of layouts in the tests of a network of harness/networks.py."""
    networks = [run.partition("/")[0].partition(".")[0] for run in RUNS]
    return sum(re.sub("^(deep_)?(long_)?|_frozen$|_lora$", "", name) == form for name in networks)


def row(family):
    """Return the cells of a family."""
    form = NETWORK_FORMS.get(family) or DEFAULT_FORMS[FAMILIES[family].network.__name__]
    heads = [HEAD_NAMES[name] for name in task_heads(family)]
    if family in WITH_VECTORS:
        heads.append("vectors")
    architecture = FAMILIES[family].architecture
    return f"`{family}`", f"`{architecture}`", ", ".join(heads), f"{count_layouts(form)} (`{form}`)"


def quoted(names):
    """Return names in backquotes, separated by commas."""
    return ", ".join(f"`{name}`" for name in names)


def written_part():
    """Return the table of families, the list of sizes and the families compared with `peft`.

    Raises:
        ValueError: If a family has no model in the tests.
    """
    untested = [family for family in FAMILIES if not models_in_tests(family)]
    if untested:
        raise ValueError(f"no test compares {quoted(untested)} with transformers")
    rows = [f"| {' | '.join(row(family))} |\n" for family in FAMILIES]
    sizes = [f"- {quoted(presets(family))}\n" for family in FAMILIES if presets(family)]
    with_peft = [family for family in FAMILIES if set(ADAPTERS) & set(models_in_tests(family))]
    return (
        f"{HEADER}{''.join(rows)}\n"
        f"Adapters of {quoted(with_peft)} are compared with `peft`.\n\n"
        "### Published sizes\n\n"
        "`from_preset` accepts these names. `dtransformer models` also prints their parameters.\n\n"
        f"{''.join(sizes)}"
    )


def page():
    """Return the text of the page with a new written part."""
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    return before + BEGIN + written_part() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
