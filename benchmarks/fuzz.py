"""Test all readers with thousands of hostile and damaged files and print counts as JSON.

    python benchmarks/fuzz.py --cases 10000 --corruptions 2000
    python benchmarks/fuzz.py --cases 1 --seed 0 --first 4711      # repeat one case

A case passes if the input is read correctly or raises a one-line error. It fails with a traceback, a
hang (20 s of processor time, 120 s of wall time), more than 1 GiB of memory, a file outside of the
folder, wrong data, or an error message of Python about types. A case depends only on its index and on
the seed. Cases run in one process, and a second process watches it. If the first one dies or hangs in
a library, a new process continues with the next case.
"""

import argparse
import collections
import contextlib
import io
import json
import os
import pathlib
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

import paths  # noqa: F401

# Limits in processor time, which does not depend on other load, and in wall time.
SECONDS, WATCHED_SECONDS, START_SECONDS = 20, 120, 1200
MAX_BYTES = 2**30
# Type errors of Python, which do not name the wrong value.
PYTHON_MESSAGES = re.compile(
    "unhashable|object is not|not supported between|' object has no attribute|unsupported operand|"
    "positional argument|unexpected keyword|must be real number|cannot unpack|object cannot be"
)
REFUSED, READ, FAILED = "refused in one line", "read", "FAILED"


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=1000, help="number of damaged inputs")
    parser.add_argument(
        "--corruptions", type=int, default=0, help="number of damaged checkpoints, runs and folders"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="index of the first case")
    parser.add_argument("--kind", help="run only cases of this kind")
    parser.add_argument("--worker", choices=["inputs", "corruptions"], help=argparse.SUPPRESS)
    return parser.parse_args()


# The process that runs the cases.


class Hang(BaseException):
    """Error for a case that takes too long. `except Exception` does not catch it."""


def work(args):
    """Run the cases from `--first` and print two lines of JSON for each."""
    out, sys.stdout = os.fdopen(os.dup(1), "w"), io.StringIO()
    os.dup2(2, 1)  # Output of libraries goes to stderr.
    import fuzz_corruptions
    import fuzz_inputs

    module = {"inputs": fuzz_inputs, "corruptions": fuzz_corruptions}[args.worker]
    num_cases = {"inputs": args.cases, "corruptions": args.corruptions}[args.worker]
    signal.signal(signal.SIGPROF, lambda *_: (_ for _ in ()).throw(Hang()))
    with tempfile.TemporaryDirectory() as home:
        home = pathlib.Path(home)
        kinds = module.prepare(home / "prepared")
        names = [args.kind] if args.kind in kinds else list(kinds)
        for case in range(args.first, args.first + num_cases):
            kind = names[case % len(names)]
            print(json.dumps({"case": case, "kind": kind}), file=out, flush=True)
            result, detail = do_case(kinds[kind], random.Random(f"{args.seed}:{case}"), home)
            sys.stdout.seek(0), sys.stdout.truncate()
            line = {"case": case, "kind": kind, "result": result, "detail": detail}
            print(json.dumps(line), file=out, flush=True)


def do_case(case, rng, home):
    """Run a case and return its result and a detail."""
    folder = home / "folder" / "inner"
    folder.mkdir(parents=True)
    before = files_outside(home, folder)
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # This resets the peak memory.
    memory, started = peak_memory(), time.monotonic()
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        result, detail = attempt(case, rng, folder)
    except Hang:
        result, detail = FAILED, "hang"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    if peak_memory() - memory > MAX_BYTES:
        result, detail = FAILED, f"memory: {(peak_memory() - memory) / 2**30:.1f} GiB"
    if files_outside(home, folder) != before:
        result, detail = FAILED, "written outside"
    shutil.rmtree(home / "folder")
    return result, detail or f"{time.monotonic() - started:.1f} s"


def attempt(case, rng, folder):
    """Call a case and return its result. A one-line InputError is not a failure."""
    from fuzz_damage import Failure

    from dtransformer.errors import InputError, to_one_line

    try:
        case(rng, folder)
        return READ, ""
    except InputError as error:
        is_line = str(error) == to_one_line(error, None) and len(to_one_line(error)) <= 300
        is_line = is_line and not PYTHON_MESSAGES.search(str(error))
        return (REFUSED, "") if is_line else (FAILED, f"message: {str(error)[:200]!r}")
    except Failure as error:
        return FAILED, str(error)
    except Exception as error:
        place = error.__traceback__
        while place.tb_next:
            place = place.tb_next
        where = f"{place.tb_frame.f_code.co_filename}:{place.tb_lineno}"
        return FAILED, f"traceback: {type(error).__name__}: {str(error)[:200]} ({where})"


def peak_memory():
    """Return the peak resident memory of the process in bytes."""
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", status)[1])


def files_outside(home, folder):
    """Return (path, size, time) of all files outside of the case's folder."""
    files = [path for path in home.rglob("*") if folder not in (path, *path.parents)]
    return {(str(p), p.lstat().st_size, p.lstat().st_mtime_ns) for p in files if not p.is_dir()}


# The process that watches.


def watch(args, worker, num_cases):
    """Run cases in other processes and return their results as dicts."""
    results, first, last = [], args.first, args.first + num_cases
    while first < last:
        case_options = {"--cases" if worker == "inputs" else "--corruptions": last - first}
        options = {**case_options, "--seed": args.seed, "--first": first, "--worker": worker}
        options |= {"--kind": args.kind} if args.kind else {}
        words = [str(word) for option in options.items() for word in option]
        stderr_file = tempfile.TemporaryFile()
        process = subprocess.Popen(
            [sys.executable, __file__, *words], stdout=subprocess.PIPE, stderr=stderr_file
        )
        lines, seconds, current = read_lines_in_thread(process), START_SECONDS, None
        with contextlib.suppress(queue.Empty):
            while line := lines.get(timeout=seconds):
                current, seconds = json.loads(line), WATCHED_SECONDS
                if "result" in current:
                    results.append(current)
                    first, current = current["case"] + 1, None
        process.kill()
        stderr_file.seek(0)
        error = stderr_file.read().decode(errors="replace")[-300:]
        if current is None and first < last:
            raise SystemExit(f"The process that runs the cases has ended: {error}")
        if current is not None:
            cause = {-signal.SIGKILL: "hang in a library"}.get(process.wait(), "crash")
            results.append({**current, "result": FAILED, "detail": f"{cause}: {error}"})
            first = current["case"] + 1
    return results


def read_lines_in_thread(process):
    """Return a queue with the output lines of a process, and b"" at its end."""
    lines = queue.Queue()

    def read():
        for line in process.stdout:
            lines.put(line)
        lines.put(b"")

    threading.Thread(target=read, daemon=True).start()
    return lines


def main():
    args = parse_arguments()
    if args.worker:
        work(args)
        return
    started = time.monotonic()
    results = watch(args, "inputs", args.cases) if args.cases else []
    results += watch(args, "corruptions", args.corruptions) if args.corruptions else []
    counts = collections.defaultdict(collections.Counter)
    for result in results:
        counts[result["kind"]][result["result"]] += 1
    failures = [result for result in results if result["result"] == FAILED]
    print(
        json.dumps(
            {
                "cases": len(results),
                "seed": args.seed,
                "minutes": round((time.monotonic() - started) / 60, 1),
                "counts": counts,
                "total": collections.Counter(result["result"] for result in results),
                "failures": failures[:50],
            },
            indent=1,
        )
    )
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
