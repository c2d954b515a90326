"""All that a machine with GPUs can tell in half an hour; prints a line of JSON a result.

    python benchmarks/gpu.py [--parts card,peaks,...] [--torch PYTHON] [--smoke] [--seconds 1800]

Parts come in the order of what is learnt first. Each is a process of its own, bounded in time: what
fails says so in its line, and the next begins. With `--jobs` several prepare side by side; what is
timed takes turns. `--smoke` is the same with tiny sizes, on CPUs too. docs/gpus.md has the results.
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
    parser.add_argument("--parts", default=",".join(PARTS), help="names, with commas")
    parser.add_argument("--variants", help="of the part speed: SIZE/COMPILED/ATTENTION, commas")
    parser.add_argument("--torch", help="a Python that has PyTorch for this card")
    parser.add_argument("--jobs", type=int, default=1, help="parts that prepare side by side")
    parser.add_argument("--seconds", type=int, default=1800, help="after which no part begins")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def limit_of(part, smoke):
    """Return the seconds that a part may take, on a few processors twice a GPU's."""
    return part.seconds * (2 if smoke else 1)


def runs_of(arguments):
    """Return (name, environment, seconds) of each process to start, in order."""
    runs = []
    for name in arguments.parts.split(","):
        if name not in PARTS:
            sys.exit(f"no part {name!r}; there are {', '.join(PARTS)}")
        part = PARTS[name]
        variants = arguments.variants.split(",") if arguments.variants else part.variants
        seconds = limit_of(part, arguments.smoke)
        for variant in variants if part.variants else [""]:
            runs.append((name + f":{variant}" * bool(variant), part.environment, seconds))
    return runs


def work(name, arguments):
    """Do one part in this process; print what it yields."""
    name, _, variant = name.partition(":")
    options = {"smoke": arguments.smoke, "torch": arguments.torch, "variant": variant}
    options["seconds"] = limit_of(PARTS[name], arguments.smoke)
    for result in PARTS[name].function()(**options):
        print("RESULT " + json.dumps(result), flush=True)


def run_part(name, environment, seconds, arguments):
    """Start a part; print its results as they come, and how it ended."""
    command = [sys.executable, __file__, "--worker", name]
    command += ["--smoke"] * arguments.smoke + ["--torch", arguments.torch] * bool(arguments.torch)
    root = str(pathlib.Path(__file__).parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    log = _FOLDER / f"{name.replace('/', '-').replace(':', '-')}.log"
    begin = time.monotonic()
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
                say(name, json.loads(line.removeprefix("RESULT ")))
            else:
                errors.write(line)
    seconds = round(time.monotonic() - begin, 1)
    if process.wait():
        said = log.read_text().strip().splitlines()[-1:] or [""]
        say(name, {"failed": process.returncode, "seconds": seconds, "said": said[0][-400:]})
    else:
        say(name, {"seconds": seconds})


def say(name, result):
    print(json.dumps({"part": name, **result}), flush=True)


def main():
    arguments = parse_arguments()
    if arguments.worker:
        return work(arguments.worker, arguments)
    _FOLDER.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + arguments.seconds

    def start(run):
        if time.monotonic() > end:
            return say(run[0], {"left_out": f"after {arguments.seconds} s"})
        run_part(*run, arguments)

    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        list(pool.map(start, runs_of(arguments)))


if __name__ == "__main__":
    main()
