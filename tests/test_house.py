"""What holds the house up: who imports whom, how large files are, what they may not do."""

import ast
import functools
import graphlib
import pathlib
import re
import statistics

import pytest

from harness.code_size import count_lines, tokens_by_folder
from harness.foreign_attributes import foreign_attributes

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "dtransformer"
FILES = sorted(PACKAGE.rglob("*.py"))

# The rooms, from top to bottom, and the rooms that each may import. All may import the bottom.
BOTTOM = {
    "_compat",
    "architectures",
    "block_forms",
    "errors",
    "files",
    "nvidia_driver",
    "quiet",
    "start",
    "tables",
    "tensor_memory",
    "version",
}
ROOMS = {
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
}
# The floors of `parallel/`, from top to bottom: a folder, or a file of its own, imports of lower floors
# only. So those that divide a network do not know each other.
FLOORS = (
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
# What is asked of a room above, when it is called: who, and whom.
ASKS_ABOVE = {
    "parallel/config/config.py": "dtransformer.planner.automatic"
}  # TransformerOpParallelConfig.auto
# Plans that are computed without devices.
PURE = (
    "parallel/config/config.py",
    "parallel/config/validators.py",
    "parallel/config/topology.py",
    "parallel/context_parallel/plan.py",
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
# What layers and models may not know of: where they are, and how what they compute is divided.
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
# Seeds, and what ranks tell each other in Python, outside of steps.
SEEN_BY_MODELS = (
    "dtransformer.parallel.collectives.objects",
    "dtransformer.parallel.runtime.seeds",
)
MAY_IMPORT_HOROVOD = (
    *("parallel/runtime/job.py", "parallel/runtime/launch.py"),
    *("cli/doctor.py", "cli/launching/job.py"),
)
MAY_SET_GLOBALS = ("parallel/config/config.py", "parallel/runtime/job.py")
OTHERS = ("benchmarks", "examples", "harness")  # of which tests import the last
MAX_LINES = 350
"""Lines of code of a file, without docstrings, comments and blank lines."""
MAX_MEDIAN_LINES = 90
# Tokens of code in the package, without docstrings and comments.
TOKEN_BUDGET = 313_000


# What is imported.


def name_of(path):
    """Return the dotted name of a module of the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in FILES}


@functools.cache
def tree_of(path):
    return ast.parse(path.read_text("utf-8"), str(path))


def imports(path, everywhere=True):
    """Return the set of the names of the modules that a file imports.

    Args:
        path: the file.
        everywhere: whether imports inside of functions count, too.
    """
    found, todo = set(), [tree_of(path)]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno} is relative: write the full name"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in MODULES else node.module)
        elif everywhere or not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            todo += ast.iter_child_nodes(node)
    return found


def relative(path):
    return path.relative_to(PACKAGE).as_posix()


def room_of(module):
    """Return the room of a module of the package; "" for the package itself."""
    return module.split(".")[1] if "." in module else ""


def test_no_import_circles():
    graph = {name: imports(path, everywhere=False) & set(MODULES) for name, path in MODULES.items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail("modules import each other in a circle: " + " ← ".join(error.args[1]))


def test_arrows_run_downwards():
    wrong = []
    for name, path in MODULES.items():
        room = room_of(name)
        allowed = {room, *BOTTOM, *ROOMS.get(room, set())}
        for other in imports(path) & set(MODULES) - {ASKS_ABOVE.get(relative(path))}:
            if room and room_of(other) and room_of(other) not in allowed:
                wrong.append(f"{relative(path)} imports {other}")
    assert not wrong, "\n".join(["not downwards:", *sorted(wrong)])


def test_floors_of_parallel():
    """A floor that is missing here, or an arrow that runs up or sideways, fails."""
    number = {folder: i for i, floor in enumerate(FLOORS) for folder in floor}
    inner = "dtransformer.parallel."
    wrong = []
    for name, path in MODULES.items():
        if name.startswith(inner):
            folder = name.removeprefix(inner).split(".")[0]
            for other in imports(path) & set(MODULES):
                below = other.removeprefix(inner).split(".")[0]
                if other.startswith(inner) and below != folder and number[below] <= number[folder]:
                    wrong.append(f"{relative(path)} imports {other}")
    assert not wrong, "\n".join(["not downwards:", *sorted(wrong)])


def test_plans_need_no_framework():
    """What is computed without devices can be tested, and read, without them."""
    wrong = [
        f"{file} imports {other}"
        for file in PURE
        for other in imports(PACKAGE / file)
        if other.split(".")[0] in FRAMEWORKS
    ]
    assert not wrong, "\n".join(wrong)


def test_layers_know_no_mesh():
    """Other functions of `parallel` are the plain operation where there is no mesh."""
    wrong = []
    for path in [*PACKAGE.glob("layers/*.py"), *PACKAGE.glob("models/*.py")]:
        names = {
            f"{node.module}.{alias.name}"
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        for name in {*names, *imports(path)}:
            if name.startswith(HIDDEN_FROM_LAYERS) and not name.startswith(SEEN_BY_MODELS):
                wrong.append(f"{relative(path)} imports {name}")
    assert not wrong, "\n".join(
        ["layers and models call constrain() and parallel/tensor_parallel instead:", *sorted(wrong)]
    )


def test_horovod_is_imported_in_one_place():
    wrong = [
        relative(path)
        for path in FILES
        if any(other.startswith("horovod") for other in imports(path))
        and relative(path) not in MAY_IMPORT_HOROVOD
    ]
    assert not wrong, f"use job.horovod() in {wrong}"


def test_no_private_names_of_other_packages():
    """They are in _compat, each with its reason and a test."""
    wrong = []
    for path in FILES:
        if path.parent.name == "_compat":
            continue
        wrong += [f"{relative(path)} imports {name}" for name in imports(path) if is_private(name)]
        wrong += [f"{relative(path)} uses {name}" for name in private_attributes(path)]
    assert not wrong, "\n".join(["private to other packages:", *sorted(wrong)])


def is_private(name):
    """Return whether a module of another package is none of its public ones."""
    top, *inner = name.split(".")
    if top == "dtransformer":
        return False
    starts = (("keras", "src"), ("tensorflow", "python"), ("tensorflow", "core"))
    hidden = any((top, *inner[:1]) == start for start in starts)
    return hidden or (top != "__future__" and any(part.startswith("_") for part in (top, *inner)))


def private_attributes(path):
    """Return the names like `tf.a._b` of a file, in which `tf` is an imported package."""
    aliases = {}
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            aliases.update({a.asname or a.name.split(".")[0]: a.name for a in node.names})
    outside = {alias for alias, name in aliases.items() if not name.startswith("dtransformer")}
    found = []
    for node in ast.walk(tree_of(path)):
        parts, inner = [], node
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        is_outside = isinstance(inner, ast.Name) and inner.id in outside
        if is_outside and any(part.startswith("_") and part[:2] != "__" for part in parts):
            found.append(".".join([inner.id, *parts[::-1]]))
    return found


def test_examples_use_public_names():
    public = {name for name in MODULES if (MODULES[name].name == "__init__.py")}
    public |= {f"dtransformer.{name}" for name in ("errors", "parallel.config")}
    public |= {
        name for name in MODULES if re.fullmatch(r"dtransformer\.(datasets|trainers)\.\w+", name)
    }
    wrong = [
        f"{path.relative_to(ROOT)} imports {other}"
        for path in ROOT.glob("examples/**/*.py")
        for other in imports(path)
        if other.split(".")[0] in ("dtransformer", "tests") and other not in public
    ]
    assert not wrong, "\n".join(wrong)


def test_no_import_of_tests():
    wrong = [
        f"{path.relative_to(ROOT)} imports {other}"
        for path in [*FILES, *(p for top in OTHERS for p in ROOT.glob(f"{top}/**/*.py"))]
        for other in imports(path)
        if other.split(".")[0] == "tests"
    ]
    assert not wrong, "\n".join(wrong)


# How it is written.


def test_sizes_of_files():
    sizes = {relative(path): count_lines(path.read_text("utf-8")) for path in FILES}
    modules = {file: size for file, size in sizes.items() if not file.endswith("__init__.py")}
    large = {file: size for file, size in sizes.items() if size > MAX_LINES}
    median = statistics.median(modules.values())
    told = f"{len(modules)} files of {sum(modules.values()):,} lines, median {median}"
    assert not large, f"more than {MAX_LINES} lines: {large}; {told}"
    assert median <= MAX_MEDIAN_LINES, f"the median is above {MAX_MEDIAN_LINES}: {told}"


def test_no_class_of_trainers_sets_attributes_of_another():
    assert foreign_attributes(PACKAGE / "trainers") == []


def test_package_stays_within_its_token_budget():
    sizes = tokens_by_folder(PACKAGE)
    total = sum(sizes.values())
    assert total <= TOKEN_BUDGET, f"{total:,} tokens of code, at most {TOKEN_BUDGET:,}: {sizes}"


def test_globals_are_set_in_one_place():
    wrong = [
        f"{relative(path)}:{node.lineno} sets {', '.join(node.names)}"
        for path in FILES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Global) and relative(path) not in MAY_SET_GLOBALS
    ]
    assert not wrong, f"pass state, or put it into parallel/tracing/trace.py: {wrong}"


def test_public_names_have_docstrings():
    wrong = [
        f"{relative(path)}:{node.lineno} {node.name}"
        for path in FILES
        for node in tree_of(path).body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
        and not node.name.startswith("_")
        and not ast.get_docstring(node)
    ]
    wrong += [relative(path) for path in FILES if not ast.get_docstring(tree_of(path))]
    assert not wrong, f"without a docstring: {wrong}"


def test_join_of_horovod_is_not_used():
    """With NCCL it has a GPU kernel only, which CPU ranks cannot try."""
    wrong = [
        relative(path) for path in FILES if re.search(r"\bhvd\.join\b", path.read_text("utf-8"))
    ]
    assert not wrong, wrong
