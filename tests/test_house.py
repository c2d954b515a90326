"""The package keeps its architecture: imports, file sizes, globals and docstrings."""

import ast
import collections
import functools
import graphlib
import pathlib
import re
import statistics

from harness.code_size import count_lines, tokens_by_folder
from harness.foreign_attributes import foreign_attributes
from harness.golf import packed_code

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "dtransformer"
FILES = sorted(PACKAGE.rglob("*.py"))

# Modules that every folder may import.
BASE_MODULES = {
    "_compat",
    "architectures",
    "block_forms",
    "errors",
    "files",
    "limits",
    "nvidia_driver",
    "preference_losses",
    "quiet",
    "start",
    "tables",
    "tensor_memory",
    "transformer_config",
    "version",
}
# Folder -> folders that it may import, from top to bottom.
ALLOWED_IMPORTS = {
    "cli": {
        *("runs", "planner", "trainers", "reports", "models", "layers", "parallel", "datasets"),
        "inputs",
    },
    "runs": {
        "planner",
        "trainers",
        "reports",
        "models",
        "layers",
        "parallel",
        "datasets",
        "inputs",
    },
    "trainers": {"reports", "layers", "parallel", "inputs"},
    "reports": {"planner", "layers", "parallel"},
    "planner": {"parallel"},
    "models": {"layers", "parallel", "inputs"},
    "layers": {"parallel"},
    "parallel": set(),
    "datasets": {"inputs"},
    "inputs": set(),
    "transformer_config": {"parallel"},
}
# Folders and files of `parallel/` in layers, from top to bottom. They import only lower layers, so
# the kinds of model parallelism do not depend on each other.
PARALLEL_LAYERS = (
    ("keras_layers",),
    ("initialize", "parallelize", "variable_factory", "initial_broadcast", "decoding"),
    ("tensor_parallel", "context_parallel", "expert_parallel", "pipeline_parallel"),
    ("recompute",),
    ("zero",),
    ("mesh",),
    ("ops", "collectives"),
    ("tracing",),
    ("weights",),
    ("runtime",),
    ("watchdog",),
    ("config",),
    ("schedules",),
)
# Files that compute plans without devices.
WITHOUT_FRAMEWORKS = (
    "transformer_config.py",
    "parallel/config/config.py",
    "parallel/config/validators.py",
    "parallel/config/topology.py",
    "parallel/context_parallel/plan.py",
    "parallel/keras_layers/layout_map.py",
    "parallel/keras_layers/rules.py",
    "parallel/zero/partition.py",
    "parallel/watchdog/activity.py",
    "parallel/watchdog/stop_barrier.py",
    "parallel/watchdog/links.py",
    "parallel/watchdog/watch.py",
    "parallel/schedules/placement.py",
    "parallel/schedules/schedules.py",
    "parallel/schedules/simulator.py",
    "parallel/schedules/timeline.py",
    *(f"planner/{path.name}" for path in PACKAGE.glob("planner/*.py")),
)
FRAMEWORKS = {"tensorflow", "keras", "horovod"}
# Layers and models must not depend on ranks, meshes and layouts.
HIDDEN_FROM_LAYERS = (
    "horovod",
    *(f"dtransformer.parallel.{name}" for name in ("collectives", "runtime", "tracing.trace")),
    *(
        f"dtransformer.parallel.mesh.{name}"
        for name in ("batch", "function", "layouts", "variable")
    ),
    *(
        f"dtransformer.parallel.mesh.axis_rules.{name}"
        for name in ("mesh_axis", "activation_specs")
    ),
    "dtransformer.parallel.mesh.axis_rules.weight_specs",
)
# Exceptions: seeds, and the exchange of Python objects outside of steps.
VISIBLE_TO_LAYERS = (
    "dtransformer.parallel.collectives.objects",
    "dtransformer.parallel.runtime.seeds",
)
MAY_IMPORT_HOROVOD = (
    *("parallel/runtime/job.py", "parallel/runtime/launch.py"),
    *("cli/doctor.py", "cli/launching/job.py"),
)
# Compilation by XLA is set for the process, like TensorFlow's own options.
MAY_SET_GLOBALS = (
    *("parallel/config/config.py", "parallel/runtime/job.py"),
    "parallel/ops/fused.py",
)
OTHER_FOLDERS = ("benchmarks", "examples", "harness")
MAX_LINES = 380
"""Lines of code of a file, without docstrings, comments and blank lines."""
MAX_MEDIAN_LINES = 90
# Maximum number of code tokens in the package, without docstrings and comments.
TOKEN_BUDGET = 353_000
# Nested comprehensions are allowed for lists of lists and dicts, but must stay rare.
MAX_NESTED_COMPREHENSIONS = 8
# Long signatures are hard to read. Group related arguments in a config object instead.
MAX_ARGUMENTS = 15
MAX_LONG_SIGNATURES = 5


# Imports.


def module_name(path):
    """Return the dotted name of a module of the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in FILES}


@functools.cache
def parse(path):
    return ast.parse(path.read_text("utf-8"), str(path))


@functools.cache
def imports(path):
    """Return the names of the modules that a file imports, also inside functions.

    `importlib.import_module("dtransformer.x")` counts as an import.
    """
    names = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: use an absolute import"
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                names.add(submodule if submodule in MODULES else node.module)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "importlib.import_module":
            names.update(x.value for x in node.args if isinstance(x, ast.Constant))
    return frozenset(names)


def relative(path):
    return path.relative_to(PACKAGE).as_posix()


def top_folder(module):
    """Return the top-level folder of a module, or "" for the package itself."""
    return module.split(".")[1] if "." in module else ""


def find_cycle(graph):
    """Return the modules of a cycle, or `None`. The graph maps modules to the modules they import."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return None


def test_no_import_cycles():
    """An import inside a function that avoids a cycle at runtime is also a cycle."""
    graph = {name: imports(path) & set(MODULES) - {name} for name, path in MODULES.items()}
    cycle = find_cycle(graph)
    assert cycle is None, "import cycle: " + " ← ".join(cycle)


def test_imports_inside_functions_are_found(tmp_path):
    file = tmp_path / "lazy.py"
    file.write_text(
        "def f():\n    from dtransformer.planner import plan\n"
        "    importlib.import_module('dtransformer.runs.loading')\n"
    )
    assert imports(file) == {"dtransformer.planner", "dtransformer.runs.loading"}
    assert find_cycle({"a": {"b"}, "b": {"a"}}) is not None


def test_folders_import_only_lower_folders():
    wrong = []
    for name, path in MODULES.items():
        folder = top_folder(name)
        allowed = {folder, *BASE_MODULES, *ALLOWED_IMPORTS.get(folder, set())}
        for imported in imports(path) & set(MODULES):
            if folder and top_folder(imported) and top_folder(imported) not in allowed:
                wrong.append(f"{relative(path)} imports {imported}")
    assert not wrong, "\n".join(["not downwards:", *sorted(wrong)])


def test_folders_of_parallel_import_only_lower_folders():
    """Every folder of `parallel` must be listed in `PARALLEL_LAYERS`."""
    level = {folder: i for i, floor in enumerate(PARALLEL_LAYERS) for folder in floor}
    prefix = "dtransformer.parallel."
    wrong = []
    for name, path in MODULES.items():
        if name.startswith(prefix):
            folder = name.removeprefix(prefix).split(".")[0]
            for imported in imports(path) & set(MODULES):
                imported_folder = imported.removeprefix(prefix).split(".")[0]
                if (
                    imported.startswith(prefix)
                    and imported_folder != folder
                    and level[imported_folder] <= level[folder]
                ):
                    wrong.append(f"{relative(path)} imports {imported}")
    assert not wrong, "\n".join(["not downwards:", *sorted(wrong)])


def test_plans_do_not_import_frameworks():
    wrong = [
        f"{file} imports {imported}"
        for file in WITHOUT_FRAMEWORKS
        for imported in imports(PACKAGE / file)
        if imported.split(".")[0] in FRAMEWORKS
    ]
    assert not wrong, "\n".join(wrong)


def test_layers_and_models_do_not_import_meshes():
    """They may call other functions of `parallel`, which work with and without a mesh."""
    wrong = []
    for path in [*PACKAGE.glob("layers/*.py"), *PACKAGE.glob("models/*.py")]:
        names = {
            f"{node.module}.{alias.name}"
            for node in ast.walk(parse(path))
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        for name in {*names, *imports(path)}:
            if name.startswith(HIDDEN_FROM_LAYERS) and not name.startswith(VISIBLE_TO_LAYERS):
                wrong.append(f"{relative(path)} imports {name}")
    assert not wrong, "\n".join(
        ["layers and models call constrain() and parallel/tensor_parallel instead:", *sorted(wrong)]
    )


def test_horovod_is_imported_in_one_place():
    wrong = [
        relative(path)
        for path in FILES
        if any(imported.startswith("horovod") for imported in imports(path))
        and relative(path) not in MAY_IMPORT_HOROVOD
    ]
    assert not wrong, f"use job.horovod() in {wrong}"


def test_private_names_of_other_packages_are_not_used():
    """Only `_compat` uses them. It states the reason for each and tests it."""
    wrong = []
    for path in FILES:
        if path.parent.name == "_compat":
            continue
        wrong += [f"{relative(path)} imports {name}" for name in imports(path) if is_private(name)]
        wrong += [f"{relative(path)} uses {name}" for name in private_attributes(path)]
    assert not wrong, "\n".join(["private names of other packages:", *sorted(wrong)])


def is_private(name):
    """Return whether a module of another package is private."""
    top, *inner = name.split(".")
    if top == "dtransformer":
        return False
    starts = (("keras", "src"), ("tensorflow", "python"), ("tensorflow", "core"))
    hidden = any((top, *inner[:1]) == start for start in starts)
    return hidden or (top != "__future__" and any(part.startswith("_") for part in (top, *inner)))


def private_attributes(path):
    """Return names such as `tf.a._b` in a file, where `tf` is an imported package."""
    aliases = {}
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            aliases.update({a.asname or a.name.split(".")[0]: a.name for a in node.names})
    outside = {alias for alias, name in aliases.items() if not name.startswith("dtransformer")}
    names = []
    for node in ast.walk(parse(path)):
        parts, value = [], node
        while isinstance(value, ast.Attribute):
            parts.append(value.attr)
            value = value.value
        is_outside = isinstance(value, ast.Name) and value.id in outside
        if is_outside and any(part.startswith("_") and part[:2] != "__" for part in parts):
            names.append(".".join([value.id, *parts[::-1]]))
    return names


def test_examples_import_only_public_names():
    public = {name for name in MODULES if (MODULES[name].name == "__init__.py")}
    public |= {f"dtransformer.{name}" for name in ("errors", "parallel.config")}
    public |= {
        name for name in MODULES if re.fullmatch(r"dtransformer\.(datasets|trainers)\.\w+", name)
    }
    wrong = [
        f"{path.relative_to(ROOT)} imports {imported}"
        for path in ROOT.glob("examples/**/*.py")
        for imported in imports(path)
        if imported.split(".")[0] in ("dtransformer", "tests") and imported not in public
    ]
    assert not wrong, "\n".join(wrong)


def test_tests_are_not_imported():
    wrong = [
        f"{path.relative_to(ROOT)} imports {imported}"
        for path in [*FILES, *(p for top in OTHER_FOLDERS for p in ROOT.glob(f"{top}/**/*.py"))]
        for imported in imports(path)
        if imported.split(".")[0] == "tests"
    ]
    assert not wrong, "\n".join(wrong)


# Code style.


def test_files_are_small():
    sizes = {relative(path): count_lines(path.read_text("utf-8")) for path in FILES}
    modules = {file: size for file, size in sizes.items() if not file.endswith("__init__.py")}
    large = {file: size for file, size in sizes.items() if size > MAX_LINES}
    median = statistics.median(modules.values())
    summary = f"{len(modules)} files of {sum(modules.values()):,} lines, median {median}"
    assert not large, f"files with more than {MAX_LINES} lines: {large}; {summary}"
    assert median <= MAX_MEDIAN_LINES, f"the median is above {MAX_MEDIAN_LINES}: {summary}"


def test_trainer_classes_do_not_set_attributes_of_others():
    assert foreign_attributes(PACKAGE / "trainers") == []


def test_package_stays_within_its_token_budget():
    sizes = tokens_by_folder(PACKAGE)
    total = sum(sizes.values())
    assert total <= TOKEN_BUDGET, f"{total:,} tokens of code, at most {TOKEN_BUDGET:,}: {sizes}"


def test_statements_have_one_idea():
    places = collections.defaultdict(list)
    for path in FILES:
        for kind, node in packed_code(parse(path)):
            places[kind].append(f"{relative(path)}:{node.lineno}")
    nested = places.pop("nested comprehension", [])
    assert not places, dict(places)
    assert len(nested) <= MAX_NESTED_COMPREHENSIONS, nested


def count_arguments(node):
    """Return the number of arguments of a function, or of the constructor of a dataclass."""
    if isinstance(node, ast.FunctionDef):
        positional = [arg.arg for arg in (*node.args.posonlyargs, *node.args.args)]
        is_method = positional[:1] in (["self"], ["cls"])
        return len(positional) - is_method + len(node.args.kwonlyargs)
    if isinstance(node, ast.ClassDef):
        decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
        if any("dataclass" in decorator for decorator in decorators):
            return sum(isinstance(statement, ast.AnnAssign) for statement in node.body)
    return 0


def test_arguments_are_counted():
    source = (
        "def f(self, a, /, b, *, c): ...\n"
        "@dataclasses.dataclass\nclass C:\n  x: int\n  y: int = 0\n"
    )
    assert [count_arguments(node) for node in ast.parse(source).body] == [3, 2]


def test_few_signatures_are_long():
    long = {
        f"{relative(path)} {node.name}": count_arguments(node)
        for path in FILES
        for node in ast.walk(parse(path))
        if count_arguments(node) > MAX_ARGUMENTS
    }
    assert len(long) <= MAX_LONG_SIGNATURES, f"group arguments in a config object: {long}"


def test_globals_are_set_in_one_place():
    wrong = [
        f"{relative(path)}:{node.lineno} sets {', '.join(node.names)}"
        for path in FILES
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Global) and relative(path) not in MAY_SET_GLOBALS
    ]
    assert not wrong, f"pass the state or store it in parallel/tracing/trace.py: {wrong}"


def test_public_names_have_docstrings():
    wrong = [
        f"{relative(path)}:{node.lineno} {node.name}"
        for path in FILES
        for node in parse(path).body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
    ]
    wrong += [relative(path) for path in FILES if not ast.get_docstring(parse(path))]
    assert not wrong, f"missing docstrings: {wrong}"


def test_horovod_join_is_not_used():
    """With NCCL it only has a GPU kernel, which CPU ranks cannot test."""
    wrong = [
        relative(path) for path in FILES if re.search(r"\bhvd\.join\b", path.read_text("utf-8"))
    ]
    assert not wrong, wrong
