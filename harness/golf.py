"""Search code for statements that pack several ideas into one line.

python -m harness.golf [FOLDER]      number of each kind by subfolder (default: dtransformer)
python -m harness.golf --show PATH   every place, with its file and line
"""

import argparse
import ast
import collections
import pathlib
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).parents[1]


def packed_code(tree: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield `(kind, node)` for each packed expression or statement of a syntax tree.

    Kinds are "tuple assignment" (`a, b = 1, 2`, except swaps), "named lambda", "multiplied text"
    (a text or list times a condition), "starred literal" (`f(*(a, b))`) and "nested comprehension".

    >>> tree = ast.parse("a, b = 1, 2; a, b = b, a; f = lambda: 0; g(*(a, b))")
    >>> [kind for kind, _ in packed_code(tree)]
    ['tuple assignment', 'named lambda', 'starred literal']
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            if isinstance(node.value, ast.Lambda):
                yield "named lambda", node
            if _is_tuple_assignment(node):
                yield "tuple assignment", node
        elif isinstance(node, ast.BinOp) and _multiplies_by_condition(node):
            yield "multiplied text", node
        elif isinstance(node, ast.Call):
            for argument in node.args:
                if isinstance(argument, ast.Starred) and _is_literal(argument.value):
                    yield "starred literal", argument
        elif isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            if _contains_comprehension(node):
                yield "nested comprehension", node


def _is_tuple_assignment(node):
    target = node.targets[0]
    if not isinstance(target, ast.Tuple) or not isinstance(node.value, ast.Tuple):
        return False
    targets = {ast.unparse(item) for item in target.elts}
    values = {ast.unparse(item) for item in node.value.elts}
    return not targets & values  # A swap assigns a target's old value.


def _multiplies_by_condition(node):
    if not isinstance(node.op, ast.Mult):
        return False
    conditions = (ast.Compare, ast.BoolOp)
    for text, condition in ((node.left, node.right), (node.right, node.left)):
        is_text = isinstance(text, ast.JoinedStr | ast.List) or (
            isinstance(text, ast.Constant) and isinstance(text.value, str)
        )
        is_condition = isinstance(condition, conditions) or (
            isinstance(condition, ast.Call)
            and ast.unparse(condition.func) in ("bool", "any", "all", "isinstance", "hasattr")
        )
        if is_text and is_condition:
            return True
    return False


def _is_literal(node):
    return isinstance(node, ast.Tuple | ast.List)


def _contains_comprehension(node):
    kinds = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
    parts = [*ast.iter_child_nodes(node)]
    return any(isinstance(inner, kinds) for part in parts for inner in ast.walk(part))


def count(folder: pathlib.Path) -> dict[str, collections.Counter]:
    """Return the number of each kind for each direct subfolder; "." for files of the folder."""
    counts = collections.defaultdict(collections.Counter)
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).parts
        subfolder = parts[0] if len(parts) > 1 else "."
        for kind, _ in packed_code(ast.parse(path.read_text("utf-8"))):
            counts[subfolder][kind] += 1
    return dict(counts)


def main() -> None:
    """Print the counts of a folder, or every place."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", nargs="?", type=pathlib.Path, default=ROOT / "dtransformer")
    parser.add_argument("--show", action="store_true", help="print every place")
    args = parser.parse_args()
    if args.show:
        files = sorted(args.path.rglob("*.py")) if args.path.is_dir() else [args.path]
        for file in files:
            for kind, node in packed_code(ast.parse(file.read_text("utf-8"))):
                print(f"{file}:{node.lineno}: {kind}: {ast.unparse(node).splitlines()[0][:90]}")
        return
    total = collections.Counter()
    for subfolder, kinds in count(args.path).items():
        total += kinds
        print(subfolder, dict(kinds), sep="\t")
    print("total", dict(total), sep="\t")


if __name__ == "__main__":
    main()
