"""Tasks that run the checks of collectives, or train as the examples do."""

import functools
import runpy
import traceback

from dtransformer.parallel.collectives import new_group
from dtransformer.parallel.runtime import job
from harness.launch import REPOSITORY
from tests.distributed.tasks.collectives import errors, functions, own, values
from tests.distributed.tasks.collectives.checks import CHECKS, failures, is_quick
from tests.distributed.tasks.collectives.groups import all_groups

FILES = values, errors, functions, own  # These modules register their checks on import.


def checks(is_short):
    """Run the checks for this number of ranks, or only the quick ones, and return the failures."""
    all_groups()
    results = {}
    for name, (sizes, function) in CHECKS.items():
        if job.size() in sizes and (is_quick(name, job.size()) or not is_short):
            failures.clear()
            try:
                function()
            except Exception:
                failures.append(traceback.format_exc()[-3000:])
            results[name] = list(failures)
    return results


def hybrid_example():
    """Train as in examples/hybrid_parallel.py, with `mp=2` on several ranks."""
    train = runpy.run_path(REPOSITORY / "examples/hybrid_parallel.py")["train"]
    return {"losses": train(mp=min(job.size(), 2))}


def example(name):
    """Train as in an example of examples/collectives on all ranks."""
    train = runpy.run_path(REPOSITORY / f"examples/collectives/{name}.py")["train"]
    return {"losses": train(new_group(range(job.size())))}


EXAMPLES = ("parameter_server", "switch_parallelism")
TASKS = {
    "checks": checks,
    "hybrid_example": hybrid_example,
    **{name: functools.partial(example, name) for name in EXAMPLES},
}
