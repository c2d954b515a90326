"""Lines of code: without docstrings, comments and blank lines, as documentation costs nothing."""

import ast
import pathlib

_COMMENTS = {".py": "#", ".cc": "//", ".h": "//"}


def code_lines(path: pathlib.Path) -> int:
    """Return the number of lines of code of a file of Python or C++, or of all in a folder."""
    if path.is_dir():
        return sum(code_lines(one) for one in path.rglob("*") if one.suffix in _COMMENTS)
    text = path.read_text("utf-8")
    texts = _lines_of_texts(text) if path.suffix == ".py" else ()
    mark = _COMMENTS[path.suffix]
    return sum(
        number not in texts and bool(line.strip()) and not line.strip().startswith(mark)
        for number, line in enumerate(text.splitlines(), start=1)
    )


def _lines_of_texts(source):
    """Return the numbers of the lines of docstrings, and of other statements that are a text."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            found.update(range(node.lineno, node.end_lineno + 1))
    return found
