"""Give what reads files thousands of hostile and damaged ones, and count; print JSON.

    python benchmarks/fuzz.py --cases 10000 --corruptions 2000
    python benchmarks/fuzz.py --cases 1 --seed 0 --first 4711      # one case again

Each case is refused in one line, or read rightly; what else may happen is a failure: a traceback, a
hang (20 s of the processor, 120 s of the clock), more than 1 GiB of memory, a file written outside of
the folder, wrong data, or what Python says of its own types. Cases are
numbered and depend on their number and the seed only. They run in one process, beside one that
watches it and counts; where it dies or hangs in a library, another one goes on with the next case.
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

# Of processor time, which others on the machine do not change; and of the clock.
SECONDS, WATCHED_SECONDS, START_SECONDS = 20, 120, 1200
MAX_BYTES = 2**30
# What Python says of types, which tells nobody which value is wrong.
PYTHONS = re.compile(
    "unhashable|object is not|not supported between|' object has no attribute|unsupported operand|"
    "positional argument|unexpected keyword|must be real number|cannot unpack|object cannot be"
)
REFUSED, READ, FAILED = "refused in one line", "read", "FAILED"


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=1000, help="inputs of all kinds")
    parser.add_argument("--corruptions", type=int, default=0, help="of a checkpoint and a run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--kind", help="cases of one kind only")
    parser.add_argument("--worker", choices=["inputs", "corruptions"], help=argparse.SUPPRESS)
    return parser.parse_args()


# The process that does the cases.


class Hang(BaseException):
    """A case takes too long; nothing may catch it."""


def work(args):
    """Do the cases from `--first` on; print a line of JSON for each."""
    out, sys.stdout = os.fdopen(os.dup(1), "w"), io.StringIO()
    os.dup2(2, 1)  # what libraries print
    import fuzz_corruptions
    import fuzz_inputs

    module = {"inputs": fuzz_inputs, "corruptions": fuzz_corruptions}[args.worker]
    number = {"inputs": args.cases, "corruptions": args.corruptions}[args.worker]
    signal.signal(signal.SIGPROF, lambda *_: (_ for _ in ()).throw(Hang()))
    with tempfile.TemporaryDirectory() as home:
        home = pathlib.Path(home)
        kinds = module.prepare(home / "prepared")
        names = [args.kind] if args.kind in kinds else list(kinds)
        for case in range(args.first, args.first + number):
            kind = names[case % len(names)]
            print(json.dumps({"case": case, "kind": kind}), file=out, flush=True)
            result, detail = do_case(kinds[kind], random.Random(f"{args.seed}:{case}"), home)
            sys.stdout.seek(0), sys.stdout.truncate()
            line = {"case": case, "kind": kind, "result": result, "detail": detail}
            print(json.dumps(line), file=out, flush=True)


def do_case(case, rng, home):
    """Return the result of a case, and what is to be said of it."""
    folder = home / "folder" / "inner"
    folder.mkdir(parents=True)
    before = files_outside(home, folder)
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak of memory counts anew
    memory, started = peak(), time.monotonic()
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        result, detail = attempt(case, rng, folder)
    except Hang:
        result, detail = FAILED, "hang"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    if peak() - memory > MAX_BYTES:
        result, detail = FAILED, f"memory: {(peak() - memory) / 2**30:.1f} GiB"
    if files_outside(home, folder) != before:
        result, detail = FAILED, "written outside"
    shutil.rmtree(home / "folder")
    return result, detail or f"{time.monotonic() - started:.1f} s"


def attempt(case, rng, folder):
    """Call a case; an InputError of one line is as good as a result."""
    from fuzz_damage import Failure

    from dtransformer.errors import InputError, one_line

    try:
        case(rng, folder)
        return READ, ""
    except InputError as error:
        is_line = str(error) == one_line(error, None) and len(one_line(error)) <= 300
        is_line = is_line and not PYTHONS.search(str(error))
        return (REFUSED, "") if is_line else (FAILED, f"message: {str(error)[:200]!r}")
    except Failure as error:
        return FAILED, str(error)
    except Exception as error:
        place = error.__traceback__
        while place.tb_next:
            place = place.tb_next
        where = f"{place.tb_frame.f_code.co_filename}:{place.tb_lineno}"
        return FAILED, f"traceback: {type(error).__name__}: {str(error)[:200]} ({where})"


def peak():
    """Return the most bytes of memory that the process has had."""
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", status)[1])


def files_outside(home, folder):
    """Return (path, size, time) of all files but those of the case."""
    found = [path for path in home.rglob("*") if folder not in (path, *path.parents)]
    return {(str(p), p.lstat().st_size, p.lstat().st_mtime_ns) for p in found if not p.is_dir()}


# The process that watches.


def watch(args, worker, number):
    """Have cases done; return the results, as dicts."""
    results, first, last = [], args.first, args.first + number
    while first < last:
        left = {"--cases" if worker == "inputs" else "--corruptions": last - first}
        options = {**left, "--seed": args.seed, "--first": first, "--worker": worker}
        options |= {"--kind": args.kind} if args.kind else {}
        words = [str(word) for option in options.items() for word in option]
        told = tempfile.TemporaryFile()
        process = subprocess.Popen(
            [sys.executable, __file__, *words], stdout=subprocess.PIPE, stderr=told
        )
        lines, seconds, current = lines_of(process), START_SECONDS, None
        with contextlib.suppress(queue.Empty):
            while line := lines.get(timeout=seconds):
                current, seconds = json.loads(line), WATCHED_SECONDS
                if "result" in current:
                    results.append(current)
                    first, current = current["case"] + 1, None
        process.kill()
        told.seek(0)
        error = told.read().decode(errors="replace")[-300:]
        if current is None and first < last:
            raise SystemExit(f"the process that does the cases has ended: {error}")
        if current is not None:
            why = {-signal.SIGKILL: "hang in a library"}.get(process.wait(), "crash")
            results.append({**current, "result": FAILED, "detail": f"{why}: {error}"})
            first = current["case"] + 1
    return results


def lines_of(process):
    """Return a queue of the lines that a process prints, and b"" at its end."""
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
