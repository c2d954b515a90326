"""Size of Python code in tokens and lines, without docstrings and comments.

    python -m harness.code_size [FOLDER]      tokens by subfolder (default: dtransformer)

Line breaks cost nothing, so that code can be written one statement per line.
"""

import ast
import collections
import io
import pathlib
import sys
import tokenize

_FREE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def count_tokens(source: str) -> int:
    """Return the number of tokens of Python source, without docstrings and other bare strings.

    >>> count_tokens('def f(x):\\n    "Docstring."\\n    return x  # comment')
    8
    """
    skipped = _lines_of_bare_strings(source)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(token.type not in _FREE and token.start[0] not in skipped for token in tokens)


def count_lines(source: str) -> int:
    """Return the number of lines of Python source, without docstrings, comments and blank lines."""
    skipped = _lines_of_bare_strings(source)
    return sum(
        line_number not in skipped and bool(line.strip()) and not line.strip().startswith("#")
        for line_number, line in enumerate(source.splitlines(), start=1)
    )


def _lines_of_bare_strings(source):
    lines = set()
    for node in ast.walk(ast.parse(source)):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            lines.update(range(node.lineno, node.end_lineno + 1))
    return lines


def tokens_by_folder(root: pathlib.Path) -> dict[str, int]:
    """Return the number of tokens of each direct subfolder; "." for files of the root."""
    sizes = collections.Counter()
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        folder = parts[0] if len(parts) > 1 else "."
        sizes[folder] += count_tokens(path.read_text("utf-8"))
    return dict(sizes.most_common())


def main(root="dtransformer"):
    """Print one row per folder, the total last."""
    sizes = tokens_by_folder(pathlib.Path(root))
    for folder, tokens in {**sizes, "total": sum(sizes.values())}.items():
        print(f"{tokens:9,}  {folder}")


if __name__ == "__main__":
    main(*sys.argv[1:])
