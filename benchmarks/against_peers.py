"""Speed of one process beside PyTorch, KerasHub and `transformers`, in turn; prints JSON.

    python benchmarks/against_peers.py [--pairs SOURCE TARGET] [--environments FOLDER]
        [--workloads translation,wide,language_model,sentences,greedy,beam_search,llama,gpt2,bert,t5,
        mixtral,qwen3,llama_lora] [--rounds 5] [--steps 4] [--picture FILE.png] [--processor]
        [--without-onednn]

Every contestant is a process of its own, in an environment that is made for it in FOLDER, and
trains a few steps, or generates, while the others wait, round after round: a machine whose speed
drifts is the same for all. One of them computes the products of a step alone, which is the limit;
of a generation all but those of attention. Where other programs take the processors, threads that
wait for each other tell more of these than of the contestants: `taskset -c 0 python … --processor` gives
each one core, and counts the seconds that it computes.
The first round of each is not counted. Those that generate have the same weights: `same_ids` is
the share of the tokens that are ours. The workload `sentences` is real text, of two files with a
sentence a line, or the embedded corpus: tokens that count are counted, not what they are padded to.
Models of published families, and adapters, begin with the weights that the peer has drawn:
`largest_difference_of_losses` is that of the first three steps from ours, as a part of them; more
than 1e-4 is an error. An environment is made where this one has other versions than it asks for.
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
# Name -> packages of its environment (None for this one), script, arguments.
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
TOLERANCE = 1e-4  # of the losses of the first steps


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workloads", default=",".join(CONTESTANTS), help="names, with commas")
    parser.add_argument("--contestants", help="names, with commas; all by default")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--steps",
        type=int,
        default=4,
        help="of a round, which is one pass, or one call, of real text",
    )
    parser.add_argument("--environments", type=pathlib.Path, default=pathlib.Path("build/peers"))
    parser.add_argument("--pairs", nargs=2, metavar="FILE", help="of the workload sentences")
    parser.add_argument("--before", type=pathlib.Path, help="another checkout, to compare with")
    parser.add_argument(
        "--without-onednn",
        action="store_true",
        help="add a contestant: this checkout with TF_ENABLE_ONEDNN_OPTS=0",
    )
    parser.add_argument("--picture", type=pathlib.Path)
    parser.add_argument(
        "--processor",
        action="store_true",
        help="seconds of the processor, not of the clock: for a machine that others use, on one core",
    )
    return parser.parse_args()


def python_of(packages, folder):
    """Return the Python of an environment with these packages, which is made if it is missing."""
    if packages is None or all(map(is_here, packages)):
        return sys.executable
    home = folder.absolute() / packages[0].partition("=")[0]
    python = home / "bin" / "python"
    if not (home / "complete").exists():
        print(f"making the environment {home}", file=sys.stderr)
        venv.create(home, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
        (home / "complete").touch()
    return python


def is_here(package):
    """Return whether this environment has a package, in the version that is asked for."""
    name, _, version = package.partition("==")
    try:
        found = importlib.metadata.version(name).partition("+")[0]  # without a build's name
    except importlib.metadata.PackageNotFoundError:
        return False
    return version in ("", found)


class Contestant:
    """A process that trains when it is asked to.

    Attributes:
        started: what it has printed of its start.
        peak_bytes: the most resident memory that it has had, from `close` on.
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
        """Return the seconds of each of so many steps."""
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self):
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        if self._process.returncode is not None:  # it died, and was waited for
            return
        _, _, usage = os.wait4(self._process.pid, 0)
        self._process.returncode, self.peak_bytes = 0, usage.ru_maxrss * 1024

    def _answer(self):
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a contestant ended: exit code {self._process.wait()}")
        return json.loads(line)


def measured(workload, args):
    """Return the medians of every round, {contestant: list of seconds}, and how each started."""
    root = pathlib.Path(__file__).parents[1]
    steps = args.steps if CONTESTANTS[workload] is TRAINING else 1
    known = CONTESTANTS[workload]
    names = args.contestants.split(",") if args.contestants else known
    chosen = {name: known[name] for name in names if name in known}
    contestants, seconds = {}, {}
    roots = dict.fromkeys(chosen, root)
    if args.before:
        chosen["before"], roots["before"] = known[OURS], args.before.absolute()
    if args.without_onednn:
        chosen[WITHOUT_ONEDNN], roots[WITHOUT_ONEDNN] = known[OURS], root
    try:
        for name, (packages, script, arguments) in chosen.items():
            python = python_of(packages, args.environments)
            variables = {"TF_ENABLE_ONEDNN_OPTS": "0"} if name == WITHOUT_ONEDNN else {}
            command_line = [workload, *arguments]
            contestants[name] = Contestant(python, script, command_line, roots[name], variables)
            print(f"{workload}: {name} started", file=sys.stderr)
        for number in range(args.rounds + 1):
            for name, contestant in contestants.items():
                median = statistics.median(contestant.run(steps))
                if number:
                    seconds.setdefault(name, []).append(median)
    finally:
        for contestant in contestants.values():
            contestant.close()
    starts = {
        name: {**contestant.started, "peak_bytes": contestant.peak_bytes}
        for name, contestant in contestants.items()
    }
    return seconds, starts


def report_of(workload, seconds, started):
    """Return what is printed of a workload."""
    sys.path.insert(0, str(PEERS))
    from workloads import workload_of

    work = workload_of(workload)
    ours, limit = seconds.get(OURS), seconds.get(LIMIT)
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
    if ours and peers:
        ratios = {name: ratios_of(values, ours) for name, values in peers.items()}
        report["times_as_fast_as"] = {name: rounded(values) for name, values in ratios.items()}
        rivals = [x for name, x in peers.items() if name != "before" and not name.startswith(OURS)]
        if rivals:
            best = ratios_of([min(values) for values in zip(*rivals)], ours)
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
            raise SystemExit(f"{workload}: not the same work: {json.dumps(report, indent=1)}")
    if workload in GENERATES:
        report["same_ids"] = {
            name: round(same_ids(results[OURS], ids), 4)
            for name, ids in results.items()
            if name != LIMIT
        }
    if limit:
        report["share_of_the_products_limit"] = {
            name: round(statistics.median(ratios_of(limit, values)), 3)
            for name, values in seconds.items()
            if name != LIMIT
        }
        report["products_gflops_per_second"] = round(
            work.flops() / statistics.median(limit) / 1e9, 1
        )
    return report


def same_ids(ours, ids):
    """Return the share of the tokens of translations that are ours."""
    pairs = [pair for rows in zip(ours, ids, strict=True) for pair in zip(*rows, strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs)


def ratios_of(values, others):
    return [value / other for value, other in zip(values, others)]


def rounded(values, factor=1.0, digits=3):
    return [round(value * factor, digits) for value in values]


def tokenized(pairs, folder):
    """Return a file with the ids of sentence pairs, as `peers/sentences.py` reads it.

    Args:
        pairs: the names of two files; the embedded corpus if None.
        folder: where the file is written.
    """
    sys.path.insert(0, str(PEERS))
    import paths  # noqa: F401
    from sentences import Sentences

    from dtransformer.datasets import SubwordTokenizer, read_pairs
    from dtransformer.datasets.embedded import sentence_pairs

    work, some = Sentences(), slice(20_000)
    sides = [side[some] for side in (read_pairs(*pairs) if pairs else zip(*sentence_pairs(20_000)))]
    tokenizer = SubwordTokenizer.train([*sides[0], *sides[1]], vocab_size=work.vocab_size)
    ids = [tokenizer.encode(side).to_list() for side in sides]
    fits = [i for i, both in enumerate(zip(*ids)) if 0 < max(map(len, both)) < work.length]
    fits = fits[: work.batch_size * work.num_batches]
    arrays = {}
    for name, side in zip(("source", "target"), ids):
        kept = [side[i] for i in fits]
        arrays[name] = np.concatenate(kept)
        arrays[f"{name}_ends"] = np.cumsum([*map(len, kept)])
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
            python = python_of(PYTORCH, args.environments)
            subprocess.run([python, script, "make", folder, *published], check=True)
        compare(args)


def compare(args):
    """Run all workloads; print the report."""
    report = {"machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores"}
    report["seconds"] = "of the processor" if args.processor else "of the clock"
    report.update(rounds=args.rounds, steps_of_a_round=args.steps, workloads={})
    for workload in args.workloads.split(","):
        report["workloads"][workload] = report_of(workload, *measured(workload, args))
        print(json.dumps(report["workloads"][workload]), file=sys.stderr)
    print(json.dumps(report, indent=2))
    if args.picture:
        draw(report["workloads"], args.picture)


def draw(workloads, path):
    """Draw the tokens per second of every contestant."""
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
