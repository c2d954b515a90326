"""Run a page of the docs from top to bottom as a reader does: save files, paste Python, run commands."""

import contextlib
import pathlib
import re
import runpy
import shlex
import sys

from dtransformer import cli
from tests.doc_pages import BLOCK, ROOT, replaced

SAVED_AS = re.compile(r"[Ss]ave [^\n]*`([\w./-]+)`[^\n]*:\s*\Z")
"""End of the text before a block that the reader saves as a file."""

RUN = ("prepare", "train", "evaluate", "generate", "predict", "embed", "translate")
"""Commands that finish within seconds on small files."""


def run_page(page, small, parsed_only=()):
    """Run the blocks of a page in order in the current folder.

    Args:
        page: Path of the page.
        small: Dict of replacements that keep a test fast.
        parsed_only: Tuple of strings. A command that contains one of them is not run.

    Returns:
        The names that the Python blocks defined.
    """
    text = page.read_text("utf-8")
    namespace = {"__name__": "__main__"}
    for match in BLOCK.finditer(text):
        language, code = match[1], replaced(match[2], small)
        saved_as = SAVED_AS.search(text[: match.start()])
        if saved_as:
            path = pathlib.Path(saved_as[1])
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(code, "utf-8")
        elif language == "python":
            exec(compile(code, f"{page.name}: {code[:40]!r}", "exec"), namespace)
        elif language == "bash":
            _run_commands(code, parsed_only)
    return namespace


def _run_commands(code, parsed_only):
    for line in code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if not words or any(text in line for text in parsed_only):
            continue
        words, source, target = _redirections(words)
        with contextlib.ExitStack() as stack:
            if source:
                file = stack.enter_context(open(source, encoding="utf-8"))
                stack.enter_context(_standard_input(file))
            if target:
                file = stack.enter_context(open(target, "w", encoding="utf-8"))
                stack.enter_context(contextlib.redirect_stdout(file))
            _run(words, line)


def _run(words, line):
    if words[0] == "dtransformer" and words[1] in RUN:
        assert cli.main(words[1:]) == 0, line
    elif words[0] == "python":
        script = pathlib.Path(words[1])
        script = script if script.exists() else ROOT / script
        with _arguments([str(script), *words[2:]]):
            runpy.run_path(str(script), run_name="__main__")


def _redirections(words):
    """Return a command without redirections, and the files of its standard input and output."""
    files = {"<": None, ">": None}
    for sign in files:
        if sign in words:
            index = words.index(sign)
            file = words[index + 1]
            del words[index : index + 2]
            in_repository = file.startswith("examples/")
            files[sign] = ROOT / file if in_repository else file
    return words, files["<"], files[">"]


@contextlib.contextmanager
def _standard_input(file):
    before, sys.stdin = sys.stdin, file
    try:
        yield
    finally:
        sys.stdin = before


@contextlib.contextmanager
def _arguments(words):
    before, sys.argv = sys.argv, words
    folder = str(pathlib.Path(words[0]).resolve().parent)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.argv = before
        sys.path.remove(folder)
