"""Promise: layers and models know no mesh, no rank and no collective."""

import ast
import pathlib

import pytest

import dtransformer

ROOT = pathlib.Path(dtransformer.__file__).parent
FILES = sorted([*(ROOT / "layers").glob("*.py"), *(ROOT / "models").glob("*.py")])
# What knows of devices and ranks. Functions of the other modules of `parallel` are the plain
# operation where there is no mesh.
MODULES = ("horovod", "dtransformer.parallel.collectives", "dtransformer.parallel.dtensor")
NAMES = {"dtensor", "job", "trace", "mesh_axis", "activation_specs", "weight_specs"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_layer_imports_nothing_of_the_mesh(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            imported = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
            for name in imported:
                is_known = name.startswith(MODULES) or name.rsplit(".", 1)[-1] in NAMES
                assert not is_known, f"{path}:{node.lineno} imports {name}"
