"""Attributes of a class that another class sets, or that a base class expects from its subclasses.

    python -m harness.foreign_attributes [FOLDER]      (default: dtransformer/trainers)

An assignment `x.name = ...` counts if `x` is another object and a class of the folder assigns `name`
to `self`. An attribute also counts if a base class in the folder reads it but only a subclass sets it.
Attributes that Keras lets callbacks set do not count.
"""

import ast
import itertools
import pathlib
import sys

ROOT = pathlib.Path(__file__).parents[1]
KERAS_ATTRIBUTES = {"stop_training", "stop_evaluating", "learning_rate"}
_SELF = ("self", "cls")


def foreign_attributes(folder: pathlib.Path) -> list[str]:
    """Return a line for each attribute that one class of a folder sets and another one owns or reads.

    Args:
        folder: Folder with Python files.
    """
    trees = {path: ast.parse(path.read_text("utf-8")) for path in sorted(folder.rglob("*.py"))}
    classes = {}
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name] = node
    return [*_assignments(trees, classes), *_read_by_bases(classes)]


def _assignments(trees, classes):
    names = set().union(*map(_set_names, classes.values())) - KERAS_ATTRIBUTES
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or isinstance(node.ctx, ast.Load):
                continue
            owner = ast.unparse(node.value)
            if node.attr in names and owner not in _SELF and owner not in classes:
                yield f"{path.name}:{node.lineno}: {ast.unparse(node)} is set"


def _read_by_bases(classes):
    for name, node in classes.items():
        family = [node, *_bases_in_folder(node, classes)]
        for setter, reader in itertools.combinations(family, 2):
            for attribute in sorted(_set_names(setter) & _read_names(reader)):
                yield f"{name}: {attribute} is set in {setter.name} and read in {reader.name}"


def _bases_in_folder(node, classes):
    """Return the base classes of a class that the folder defines, direct and indirect."""
    bases = []
    for base in node.bases:
        parent = classes.get(ast.unparse(base).rpartition(".")[2])
        if parent is not None and parent is not node:  # A class may have the name of its base.
            bases += [parent, *_bases_in_folder(parent, classes)]
    return bases


def _attributes_of_self(node, context):
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, context):
            if isinstance(inner.value, ast.Name) and inner.value.id == "self":
                yield inner.attr


def _set_names(node):
    return set(_attributes_of_self(node, ast.Store))


def _read_names(node):
    """Return the attributes of `self` that a class reads without defining or declaring them."""
    defined = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
    for item in node.body:
        if isinstance(item, ast.Assign | ast.AnnAssign):
            defined |= {name.id for name in ast.walk(item) if isinstance(name, ast.Name)}
    return set(_attributes_of_self(node, ast.Load)) - defined - _set_names(node)


def main() -> None:
    """Print and count the attributes that classes of a folder set or share."""
    folder = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "dtransformer/trainers"
    lines = foreign_attributes(folder.resolve())
    print(*lines, f"{len(lines)} attributes of a class are set or shared by another", sep="\n")


if __name__ == "__main__":
    main()
