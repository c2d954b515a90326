"""Run all benchmarks of a machine with GPUs in half an hour; print one line of JSON per result.

    python benchmarks/gpu.py [--parts card,peaks,...] [--torch PYTHON] [--smoke] [--seconds 1800]

The most important parts run first. Each part is a separate process with a time limit. A failed part
prints its error and the next part starts. With `--jobs`, several parts prepare at the same time, but
timed sections take turns. `--smoke` uses tiny sizes and also works on CPUs. See docs/gpus.md for the
results.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys
import time

import paths  # noqa: F401

from benchmarks.gpu_parts import PARTS

_FOLDER = pathlib.Path("build/gpu")


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS), help="names, separated by commas")
    parser.add_argument("--variants", help="of the part speed: SIZE/COMPILED/ATTENTION,...")
    parser.add_argument("--torch", help="Python with PyTorch for this GPU")
    parser.add_argument("--jobs", type=int, default=1, help="parts that prepare at the same time")
    parser.add_argument(
        "--seconds", type=int, default=1800, help="seconds after which no part starts"
    )
    parser.add_argument("--smoke", action="store_true", help="tiny sizes")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def time_limit(part, smoke):
    """Return the time limit of a part in seconds: twice as long on CPUs."""
    return part.seconds * (2 if smoke else 1)


def list_runs(arguments):
    """Return (name, environment, seconds) of each process, in order."""
    runs = []
    for name in arguments.parts.split(","):
        if name not in PARTS:
            sys.exit(f"Unknown part {name!r}. Choose from {', '.join(PARTS)}.")
        part = PARTS[name]
        variants = arguments.variants.split(",") if arguments.variants else part.variants
        seconds = time_limit(part, arguments.smoke)
        for variant in variants if part.variants else [""]:
            runs.append((name + f":{variant}" * bool(variant), part.environment, seconds))
    return runs


def work(name, arguments):
    """Run one part in this process and print its results."""
    name, _, variant = name.partition(":")
    options = {"smoke": arguments.smoke, "torch": arguments.torch, "variant": variant}
    options["seconds"] = time_limit(PARTS[name], arguments.smoke)
    for result in PARTS[name].function()(**options):
        print("RESULT " + json.dumps(result), flush=True)


def run_part(name, environment, seconds, arguments):
    """Start a part and print its results and its end."""
    command = [sys.executable, __file__, "--worker", name]
    command += ["--smoke"] * arguments.smoke + ["--torch", arguments.torch] * bool(arguments.torch)
    root = str(pathlib.Path(__file__).parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    log = _FOLDER / f"{name.replace('/', '-').replace(':', '-')}.log"
    start_time = time.monotonic()
    with open(log, "w") as errors:
        process = subprocess.Popen(
            ["timeout", "--kill-after=5", str(seconds), *command],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, **environment, "PYTHONPATH": path},
        )
        for line in process.stdout:
            if line.startswith("RESULT "):
                print_result(name, json.loads(line.removeprefix("RESULT ")))
            else:
                errors.write(line)
    seconds = round(time.monotonic() - start_time, 1)
    if process.wait():
        last_lines = log.read_text().strip().splitlines()[-1:] or [""]
        print_result(
            name, {"failed": process.returncode, "seconds": seconds, "said": last_lines[0][-400:]}
        )
    else:
        print_result(name, {"seconds": seconds})


def print_result(name, result):
    print(json.dumps({"part": name, **result}), flush=True)


def main():
    arguments = parse_arguments()
    if arguments.worker:
        return work(arguments.worker, arguments)
    _FOLDER.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + arguments.seconds

    def start(run):
        if time.monotonic() > end:
            return print_result(run[0], {"left_out": f"after {arguments.seconds} s"})
        run_part(*run, arguments)

    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(start, list_runs(arguments)))


if __name__ == "__main__":
    main()
