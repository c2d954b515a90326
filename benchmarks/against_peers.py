"""Compare the speed of one process with PyTorch, KerasHub and `transformers`; print JSON.

    python benchmarks/against_peers.py [--pairs SOURCE TARGET] [--environments FOLDER]
        [--workloads translation,wide,language_model,sentences,greedy,beam_search,llama,gpt2,bert,t5,
        mixtral,qwen3,llama_lora] [--rounds 5] [--steps 4] [--picture FILE.png] [--processor]
        [--without-onednn]

Every contestant runs in a separate process. If this environment lacks the required versions, the
benchmark creates another one in FOLDER. In each round, the contestants take turns to train a few steps
or to generate, so that changes in the machine's speed affect all of them. The first round does not
count. The contestant `products` only computes the matrix products of a step, except for attention
during generation, and gives the upper limit of speed. On a busy machine,
`taskset -c 0 python … --processor` gives each contestant one core and measures processor time.

Generating contestants have the same weights. `same_ids` is the fraction of tokens that equal ours. The
workload `sentences` is real text from two files with one sentence per line, or from the embedded
corpus. It does not count padding. Published models and adapters start from the initial weights of the
peer. `largest_difference_of_losses` is the largest relative difference from our losses in the first
three steps. More than 1e-4 is an error.
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import venv

import numpy as np

PEERS = pathlib.Path(__file__).parent / "peers"
PYTORCH = ["torch==2.13.0", "numpy", "transformers==5.23.0", "peft==0.21.2"]
KERAS_HUB = ["tensorflow==2.21.0", "keras==3.15.1", "keras-hub"]
# Name -> (packages of its environment or `None` for this environment, script, arguments).
TRAINING = {
    "dtransformer": (None, "ours.py", []),
    "dtransformer_xla": (None, "ours.py", ["xla"]),
    "pytorch": (PYTORCH, "pytorch.py", ["eager"]),
    "pytorch_compiled": (PYTORCH, "pytorch.py", ["compiled"]),
    "keras_hub": (KERAS_HUB, "keras_hub_layers.py", ["tensorflow"]),
    "keras_hub_xla": (KERAS_HUB, "keras_hub_layers.py", ["xla"]),
    "products": (None, "products.py", []),
}
GENERATING = {
    "dtransformer": (None, "ours_generating.py", []),
    "transformers": (PYTORCH, "transformers_generating.py", []),
    "products": (None, "products.py", []),
}
SENTENCES = {
    "dtransformer": (None, "ours_packed.py", []),
    "pytorch": (PYTORCH, "pytorch.py", ["eager"]),
    "pytorch_by_length": (PYTORCH, "pytorch.py", ["by_length"]),
}
PUBLISHED = {
    "dtransformer": (None, "ours_published.py", []),
    "transformers": (PYTORCH, "transformers_training.py", ["eager"]),
    "transformers_compiled": (PYTORCH, "transformers_training.py", ["compiled"]),
}
OURS, LIMIT = "dtransformer", "products"
WITHOUT_ONEDNN = "dtransformer_without_onednn"
GENERATES = "greedy", "beam_search"
CONTESTANTS = {
    **dict.fromkeys(("translation", "wide", "language_model"), TRAINING),
    "sentences": SENTENCES,
    **dict.fromkeys(GENERATES, GENERATING),
    **dict.fromkeys(("llama", "gpt2", "bert", "t5", "mixtral", "qwen3", "llama_lora"), PUBLISHED),
}
TOLERANCE = 1e-4  # Relative difference of the losses of the first steps.


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--workloads", default=",".join(CONTESTANTS), help="names, separated by commas"
    )
    parser.add_argument("--contestants", help="names, separated by commas (default: all)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--steps",
        type=int,
        default=4,
        help="training steps in each round; other workloads make one pass or one call",
    )
    parser.add_argument("--environments", type=pathlib.Path, default=pathlib.Path("build/peers"))
    parser.add_argument("--pairs", nargs=2, metavar="FILE", help="files for the workload sentences")
    parser.add_argument("--before", type=pathlib.Path, help="another checkout to compare with")
    parser.add_argument(
        "--without-onednn",
        action="store_true",
        help="add a contestant: this checkout with TF_ENABLE_ONEDNN_OPTS=0",
    )
    parser.add_argument("--picture", type=pathlib.Path)
    parser.add_argument(
        "--processor",
        action="store_true",
        help="measure processor time instead of wall time, for one core of a busy machine",
    )
    return parser.parse_args()


def environment_python(packages, folder):
    """Return the Python of an environment with these packages. Create it if necessary."""
    if packages is None or all(map(is_installed, packages)):
        return sys.executable
    home = folder.absolute() / packages[0].partition("=")[0]
    python = home / "bin" / "python"
    if not (home / "complete").exists():
        print(f"Creating the environment {home}.", file=sys.stderr)
        venv.create(home, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
        (home / "complete").touch()
    return python


def is_installed(package):
    """Return whether this environment has a package in the required version."""
    name, _, version = package.partition("==")
    try:
        installed_version = importlib.metadata.version(name).partition("+")[
            0
        ]  # Drop the local version.
    except importlib.metadata.PackageNotFoundError:
        return False
    return version in ("", installed_version)


class Contestant:
    """Process that runs steps on request.

    Attributes:
        started: Dict that the process prints after its start.
        peak_bytes: Peak resident memory of the process. Set by `close`.
    """

    def __init__(self, python, script, arguments, root, variables):
        environment = {
            **os.environ,
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "PYTHONPATH": str(root),
            **variables,
        }
        self._process = subprocess.Popen(
            [python, PEERS / script, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.started = self._answer()

    def run(self, steps):
        """Run `steps` steps and return the seconds of each."""
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self):
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        if self._process.returncode is not None:  # It died earlier.
            return
        _, _, usage = os.wait4(self._process.pid, 0)
        self._process.returncode, self.peak_bytes = 0, usage.ru_maxrss * 1024

    def _answer(self):
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"A contestant ended with exit code {self._process.wait()}.")
        return json.loads(line)


def measured(workload, args):
    """Run all rounds of a workload.

    Returns:
        A `(seconds, starts)` tuple: dicts of contestants to lists of the median seconds of each
        round, and to reports of their start.
    """
    root = pathlib.Path(__file__).parents[1]
    steps = args.steps if CONTESTANTS[workload] is TRAINING else 1
    all_contestants = CONTESTANTS[workload]
    names = args.contestants.split(",") if args.contestants else all_contestants
    chosen = {name: all_contestants[name] for name in names if name in all_contestants}
    contestants, seconds = {}, {}
    roots = dict.fromkeys(chosen, root)
    if args.before:
        chosen["before"], roots["before"] = all_contestants[OURS], args.before.absolute()
    if args.without_onednn:
        chosen[WITHOUT_ONEDNN], roots[WITHOUT_ONEDNN] = all_contestants[OURS], root
    try:
        for name, (packages, script, arguments) in chosen.items():
            python = environment_python(packages, args.environments)
            variables = {"TF_ENABLE_ONEDNN_OPTS": "0"} if name == WITHOUT_ONEDNN else {}
            command_line = [workload, *arguments]
            contestants[name] = Contestant(python, script, command_line, roots[name], variables)
            print(f"{workload}: {name} started", file=sys.stderr)
        for round_index in range(args.rounds + 1):
            for name, contestant in contestants.items():
                median = statistics.median(contestant.run(steps))
                if round_index:
                    seconds.setdefault(name, []).append(median)
    finally:
        for contestant in contestants.values():
            contestant.close()
    starts = {
        name: {**contestant.started, "peak_bytes": contestant.peak_bytes}
        for name, contestant in contestants.items()
    }
    return seconds, starts


def make_report(workload, seconds, started):
    """Return the report of a workload as a dict."""
    sys.path.insert(0, str(PEERS))
    from workloads import get_workload

    work = get_workload(workload)
    our_seconds, limit = seconds.get(OURS), seconds.get(LIMIT)
    peers = {name: values for name, values in seconds.items() if name not in (OURS, LIMIT)}
    report = {
        "step_ms": {name: rounded(values, 1e3, 1) for name, values in seconds.items()},
        "tokens_per_second": {
            name: round(work.tokens / statistics.median(values))
            for name, values in seconds.items()
            if name != LIMIT
        },
        "first_step_s": {
            name: round(start["first_step_s"], 1)
            for name, start in started.items()
            if name != LIMIT
        },
    }
    report["peak_mib"] = {
        name: round(start["peak_bytes"] / 2**20) for name, start in started.items() if name != LIMIT
    }
    report["tokens_per_second_by_round"] = {
        name: rounded([work.tokens / value for value in values], digits=0)
        for name, values in seconds.items()
        if name != LIMIT
    }
    if our_seconds and peers:
        ratios = {name: compute_ratios(values, our_seconds) for name, values in peers.items()}
        report["times_as_fast_as"] = {name: rounded(values) for name, values in ratios.items()}
        rivals = [x for name, x in peers.items() if name != "before" and not name.startswith(OURS)]
        if rivals:
            best = compute_ratios([min(values) for values in zip(*rivals)], our_seconds)
            report["times_as_fast_as_the_best_peer"] = rounded(best)
            report["median_against_the_best_peer"] = round(statistics.median(best), 3)
    results = {name: start["result"] for name, start in started.items()}
    if CONTESTANTS[workload] is PUBLISHED and OURS in results:
        report["losses"] = {name: rounded(losses, digits=6) for name, losses in results.items()}
        report["largest_difference_of_losses"] = {
            name: max(abs(a / b - 1) for a, b in zip(losses, results[OURS], strict=True))
            for name, losses in results.items()
        }
        if max(report["largest_difference_of_losses"].values()) > TOLERANCE:
            raise SystemExit(f"{workload}: the losses differ: {json.dumps(report, indent=1)}")
    if workload in GENERATES:
        report["same_ids"] = {
            name: round(same_ids(results[OURS], ids), 4)
            for name, ids in results.items()
            if name != LIMIT
        }
    if limit:
        report["share_of_the_products_limit"] = {
            name: round(statistics.median(compute_ratios(limit, values)), 3)
            for name, values in seconds.items()
            if name != LIMIT
        }
        report["products_gflops_per_second"] = round(
            work.flops() / statistics.median(limit) / 1e9, 1
        )
    return report


def same_ids(our_ids, ids):
    """Return the fraction of translated tokens that equal ours."""
    pairs = [pair for rows in zip(our_ids, ids, strict=True) for pair in zip(*rows, strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs)


def compute_ratios(values, denominators):
    return [value / denominator for value, denominator in zip(values, denominators)]


def rounded(values, factor=1.0, digits=3):
    return [round(value * factor, digits) for value in values]


def tokenized(pairs, folder):
    """Write the ids of sentence pairs to a file for `peers/sentences.py` and return its path.

    Args:
        pairs: Names of two files, or `None` for the embedded corpus.
        folder: Folder of the new file.
    """
    sys.path.insert(0, str(PEERS))
    import paths  # noqa: F401
    from sentences import Sentences

    from dtransformer.datasets import SubwordTokenizer, read_pairs
    from dtransformer.datasets.embedded import sentence_pairs

    work, first_pairs = Sentences(), slice(20_000)
    sides = [
        side[first_pairs]
        for side in (read_pairs(*pairs) if pairs else zip(*sentence_pairs(20_000)))
    ]
    tokenizer = SubwordTokenizer.train([*sides[0], *sides[1]], vocab_size=work.vocab_size)
    ids = [tokenizer.encode(side).to_list() for side in sides]
    fits = [i for i, pair_ids in enumerate(zip(*ids)) if 0 < max(map(len, pair_ids)) < work.length]
    fits = fits[: work.batch_size * work.num_batches]
    arrays = {}
    for name, side in zip(("source", "target"), ids):
        selected = [side[i] for i in fits]
        arrays[name] = np.concatenate(selected)
        arrays[f"{name}_ends"] = np.cumsum([*map(len, selected)])
    path = pathlib.Path(folder) / "sentences.npz"
    np.savez(path, **arrays)
    return path


def main():
    args = parse_arguments()
    if args.processor:
        os.environ["DTRANSFORMER_PROCESSOR"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        if "sentences" in args.workloads.split(","):
            os.environ["DTRANSFORMER_SENTENCES"] = str(tokenized(args.pairs, folder))
        if published := [x for x in args.workloads.split(",") if CONTESTANTS[x] is PUBLISHED]:
            os.environ["DTRANSFORMER_PUBLISHED"] = folder
            script = PEERS / "transformers_training.py"
            python = environment_python(PYTORCH, args.environments)
            subprocess.run([python, script, "make", folder, *published], check=True)
        compare(args)


def compare(args):
    """Run all workloads and print the report."""
    report = {"machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores"}
    report["seconds"] = "of the processor" if args.processor else "of the clock"
    report.update(rounds=args.rounds, steps_of_a_round=args.steps, workloads={})
    for workload in args.workloads.split(","):
        report["workloads"][workload] = make_report(workload, *measured(workload, args))
        print(json.dumps(report["workloads"][workload]), file=sys.stderr)
    print(json.dumps(report, indent=2))
    if args.picture:
        draw(report["workloads"], args.picture)


def draw(workloads, path):
    """Plot the tokens per second of every contestant."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(workloads), figsize=(4 * len(workloads), 3.2))
    for axis, (name, report) in zip([axes] if len(workloads) == 1 else axes, workloads.items()):
        speeds = report["tokens_per_second"]
        axis.barh(list(speeds), list(speeds.values()))
        axis.invert_yaxis()
        axis.set_title(name.replace("_", " "))
        axis.set_xlabel("tokens per second")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
