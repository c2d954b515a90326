"""Code in the docs works as pasted: Python runs, commands and configs are valid.

The Python blocks of a page run in order. The page on checkpoints continues the README's example.
"""

import argparse
import ast
import contextlib
import functools
import importlib.util
import json
import pathlib
import re
import runpy
import shlex
import sys
import textwrap

import pytest

from dtransformer import cli
from dtransformer.cli.options import make_parser
from dtransformer.errors import InputError
from dtransformer.runs import config
from dtransformer.runs.options import SECTIONS
from tests.doc_pages import EXAMPLE, ROOT, blocks, doc_pages, page_name, replaced

PAGES = [*doc_pages(), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
README = ROOT / "README.md"
# Page -> replacements that keep it fast. Each old text must exist on the page.
SMALL = {
    "README.md": EXAMPLE,
    "checkpoints.md": {"epochs=10": "epochs=2"},
    "data.md": {
        "length=1024": "length=8",
        "batch_size=64": "batch_size=4",
        "256": "16",
        "num_layers=4": "num_layers=1",
        "er 8000": "er 40",
    },
    "experts.md": {"32000": "60", "512": "16", "=12": "=2"},
    "fine-tuning.md": {"512": "32", "batch_size=8": "batch_size=2"},
    "memory.md": {"select": "select"},
    "models.md": {"30522": "60", "768": "24", "num_layers=12": "num_layers=1"},
}
# (page, text of a block) -> reason not to run the block. Only its names are compared with the code.
NOT_RUN = {
    ("generation.md", "intra_op_parallelism"): "it must be set before the first tensor",
    ("training.md", "simple_evaluate"): "the harness is a separate package",
    (
        "keras.md",
        "GemmaCausalLM",
    ): "it downloads weights; tests/trainers/test_hub_tasks.py covers it",
    ("pipeline.md", "timeline"): "a pipeline needs several processes; tests/distributed/ covers it",
}
# Commands of other packages, and names of files that the reader writes.
FOREIGN_NAMES = {
    "lm_eval",
    "train.py",
    "llama.py",
    "layout.py",
    "score.py",
    "x.py",
    "hosts.txt",
    "git+URL",
}


def run(page, namespace, small=None):
    """Run a page's Python blocks with the replacements `small` and return their namespace."""
    for i, code in enumerate(blocks(page, "python")):
        code = replaced(code, small or {})
        tree = compile(code, f"{page.name}, block {i + 1}", "exec", ast.PyCF_ONLY_AST)
        if any(page.name == name and text in code for name, text in NOT_RUN):
            check_names(tree)
        else:
            exec(compile(tree, f"{page.name}, block {i + 1}", "exec"), namespace)
    return namespace


def check_names(tree):
    """Fail if an attribute of `trainer` or an imported module does not exist."""
    from dtransformer import Trainer

    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "trainer":
            assert hasattr(Trainer, node.attr)
        if isinstance(node, ast.Import):
            for name in {x.name for x in node.names} - FOREIGN_NAMES:
                importlib.import_module(name)


@functools.cache
def first_example():
    """Run the README's example and return its names and `dev_batches`."""
    names = run(README, {}, SMALL["README.md"])
    return {**names, "dev_batches": names["batches"]}


def write_llama(folder):
    """Write a small Llama, whose sizes `quantize` accepts, with a tokenizer for `prepare`."""
    from dtransformer.datasets import SubwordTokenizer
    from dtransformer.models import CausalLM, save_pretrained

    tokenizer = SubwordTokenizer.train(["A question and an answer."] * 3, 40)
    options = {"positions": "rotary", "norm": "rms_norm", "gated": True, "use_bias": False}
    network = CausalLM(
        tokenizer.vocab_size,
        hidden_size=64,
        num_heads=2,
        num_layers=1,
        hidden_act="silu",
        embedding_scale=1.0,
        **options,
    )
    network.build()
    save_pretrained(network, folder, "llama", tokenizer=tokenizer)


def write_page_files(page):
    """Write the files that a page expects, and run its `prepare` commands."""
    text = "It is a good day.\n\nWe read it again.\n\n" * 12
    if page == "data.md":
        pathlib.Path("books").mkdir()
        for name in ("books/one.txt", "held_out.txt"):
            pathlib.Path(name).write_text(text)
        import gzip

        with gzip.open("news.jsonl.gz", "wt") as file:
            file.write(json.dumps({"text": text}))
    elif page == "planner.md":
        options = ["--devices", "1", "--device", "h100", "--global-batch", "8"]
        assert cli.main(["plan", "--model", "bert-base", *options, "--yaml", "plan.yaml"]) == 0
    elif page in ("fine-tuning.md", "models.md", "migrating-fine-tuning.md"):
        write_llama("models/llama-3.2-1b")
        line = json.dumps({"prompt": "A question", "answer": " and an answer."}) + "\n"
        pathlib.Path("answers.jsonl").write_text(line * 8)
    elif page == "patterns.md":
        pathlib.Path("books.txt").write_text(text)
    for code in blocks(ROOT / "docs" / page, "bash") if page != "README.md" else ():
        code = replaced(code, SMALL.get(page, {}))
        for words in commands(code):
            if words[:2] == ["dtransformer", "prepare"]:
                expanded = [str(x) for word in words for x in glob(word)]
                assert cli.main(expanded[1:]) == 0


def glob(word):
    return sorted(pathlib.Path().glob(word)) if "*" in word else [word]


@pytest.fixture
def own_families():
    """Remove families of pretrained models that a page registers."""
    from dtransformer.models.pretrained.families import FAMILIES

    before = dict(FAMILIES)
    yield
    FAMILIES.clear()
    FAMILIES.update(before)


# tests/test_tutorials.py runs the pages of subfolders with their commands and files.
PASTED = [page.name for page in PAGES if blocks(page, "python") and page_name(page) == page.name]


@pytest.mark.parametrize("page", PASTED)
@pytest.mark.tensorflow
@pytest.mark.usefixtures("own_families")
def test_python_runs_as_pasted(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = next(path for path in PAGES if path.name == page)
    text = path.read_text("utf-8")
    small = SMALL.get(page, {})
    assert all(old in text for old in small), f"SMALL replaces texts that {page} does not contain"
    write_page_files(page)
    if page == "README.md":
        first_example()
    elif page == "checkpoints.md":
        names = dict(first_example())
        names["dtransformer"].init()
        run(path, names, small)
    else:
        run(path, {}, small)


def test_patterns_have_twenty_lines():
    for code in blocks(ROOT / "docs/patterns.md", "python"):
        assert len([line for line in code.splitlines() if line.strip()]) <= 20, code


def commands(code):
    """Return the words of each command in a shell block."""
    lines = code.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


SHOWN = [
    (page_name(page), words)
    for page in PAGES
    for code in blocks(page, "bash")
    for words in commands(code)
]


@pytest.mark.parametrize(
    "page, words", SHOWN, ids=lambda x: x if isinstance(x, str) else " ".join(x)
)
def test_commands_and_options_exist(page, words, monkeypatch):
    check_command(words, monkeypatch)


def check_command(words, monkeypatch):
    """Fail if a command or one of its options does not exist."""
    words = list(words)
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):  # an environment variable
        del words[0]
    for sign in "<>":
        words = words[: words.index(sign)] if sign in words else words
    name = words[0]
    if name == "dtransformer":
        arguments = make_parser().parse_args(words[1:])
        if getattr(arguments, "rank_command", None):
            check_command(arguments.rank_command[1:], monkeypatch)
        for setting in getattr(arguments, "set", ()):
            check_setting(setting)
    elif name == "make":
        check_make(words[1:])
    elif name == "horovodrun":
        check_command(strip_horovodrun_options(words[1:]), monkeypatch)
    elif name in ("python", "python3"):
        check_script(words[1:], monkeypatch)
    elif name == "pip":
        check_extras(words)
    elif name != "curl":  # downloads of samples
        assert (ROOT / name).exists(), f"{name} is not a known command"


def check_setting(setting):
    """Fail if no task accepts a setting such as "training.epochs=3"."""
    errors = []
    for task in SECTIONS:
        try:
            config.load_config(None, [f"task={task}", setting])
            return
        except InputError as error:
            errors.append(str(error))
    raise AssertionError("\n".join(errors))


def check_make(words):
    text = (ROOT / "Makefile").read_text("utf-8")
    for word in words:
        variable, value, _ = word.partition("=")
        kind = rf"^{variable} [?]?:?=|\({variable}\)" if value else rf"^{variable}:"
        assert re.search(kind, text, re.MULTILINE), f"the Makefile does not define {word}"


def strip_horovodrun_options(words):
    while words[0].startswith("-"):
        assert words[0] in ("-np", "-H", "--gloo"), words[0]
        words = words[1:] if words[0] == "--gloo" else words[2:]
    return words


def check_script(words, monkeypatch):
    """Run a script until it parses its arguments, and fail if an argument is unknown."""
    if words[0] == "-m":
        words = [words[1].replace(".", "/") + ".py", *words[2:]]
    script, *options = words
    if script in FOREIGN_NAMES:
        return
    assert (ROOT / script).exists(), f"{script} does not exist"

    class Parsed(Exception):
        pass

    def parse(parser, args=None, namespace=None):
        _, unknown = parser.parse_known_args(args, namespace)
        assert not unknown, f"{script} does not know {unknown}"
        raise Parsed

    def error(parser, message):
        raise AssertionError(f"{script}: {message}")

    with monkeypatch.context() as patched, pytest.raises(Parsed):
        patched.setattr(argparse.ArgumentParser, "parse_args", parse)
        patched.setattr(argparse.ArgumentParser, "error", error)
        patched.setattr(sys, "argv", [script, *options])
        patched.syspath_prepend(ROOT)
        patched.syspath_prepend((ROOT / script).parent)
        runpy.run_path(str(ROOT / script), run_name="__main__")


def check_extras(words):
    text = (ROOT / "setup.cfg").read_text("utf-8")
    for extra in re.findall(r"\[(.*)\]", " ".join(words)):
        for name in extra.split(","):
            assert f"\n{name} =\n" in text


@pytest.mark.parametrize("page", [page_name(page) for page in PAGES if blocks(page, "yaml")])
def test_configs_are_valid(page, tmp_path):
    for code in blocks(next(path for path in PAGES if page_name(path) == page), "yaml"):
        (tmp_path / "mine.yaml").write_text(code)
        config.load_config(tmp_path / "mine.yaml")


def test_family_example_is_an_entry_of_the_table():
    (example,) = blocks(ROOT / "docs/new-family.md", "yml")
    table = ROOT / "dtransformer/models/pretrained/families/families.yaml"
    assert textwrap.indent(example.strip(), "  ") in table.read_text("utf-8")


def test_inline_commands_are_parsed():
    """Check commands such as `dtransformer train` in running text, if they are complete."""
    wrong = []
    for page in PAGES:
        for code in re.findall(
            r"`(dtransformer [a-z][^`]*)`", page.read_text("utf-8").replace("\n", " ")
        ):
            with contextlib.suppress(SystemExit):
                try:
                    make_parser().parse_args(shlex.split(code)[1:])
                except InputError as error:
                    if "required" not in str(error):
                        wrong.append(f"{page_name(page)}: {code}: {error}")
    assert not wrong, "\n".join(wrong)
