"""Tables for the docs from the output of benchmarks/drills.py."""

import collections
import json
import pathlib

ASKED = "was asked to end"  # End of the error if the user stopped the drill.
ENDS, NEXT, LOST = "seconds_to_end", "seconds_to_next_step", "steps_lost"


def table(files):
    """Return Markdown tables of the faults by kind and by layout."""
    runs = [json.loads(pathlib.Path(file).read_text()) for file in files]
    failed = [run for run in runs if run["failed"] and not run["failed"].endswith(ASKED)]
    counted = [run for run in runs if run not in failed]
    short = sum(bool(run["failed"]) for run in counted)
    number = sum(ENDS in one for run in runs for one in run["faults"])
    parts = [_by_kind(runs), _by_layout(runs)]
    last = (
        f"{number} faults in {len(runs)} jobs. {short} jobs were stopped early by the user. "
        f"{len(failed)} jobs did not react as expected."
    )
    return "\n\n".join([*filter(None, parts), last])


def _by_kind(runs):
    """Return a table with a row per kind of fault that ended in a restart."""
    settings = sorted({run["stall_seconds"] for run in runs}, reverse=True)
    kinds = collections.defaultdict(list)
    for run in runs:
        for one in run["faults"]:
            if ENDS in one:
                of_run = {name: run[name] for name in ("hosts", "stall_seconds")}
                kinds[one["fault"]].append(one | of_run)
    heads = ["fault", "on one host", "on two hosts"]
    heads += [f"ended after (s), {one:.0f}" for one in settings]
    rows = []
    for kind, faults in sorted(kinds.items()):
        on = collections.Counter(one["hosts"] for one in faults)
        spans = [
            _span([one[ENDS] for one in faults if one["stall_seconds"] == setting])
            for setting in settings
        ]
        others = [_span([one[key] for one in faults]) for key in (NEXT, LOST)]
        rows.append([kind, on[1] or "", on[2] or "", *spans, *others])
    return _rows([*heads, "next step after (s)", "steps lost"], rows)


def _by_layout(runs):
    """Return a table with a row per layout, separately for jobs that may resume with fewer ranks."""
    groups = collections.defaultdict(list)
    for run in runs:
        groups[run["layout"], bool(run["min_ranks"])].append(run)
    rows = []
    for (layout, is_refitted), some in sorted(groups.items()):
        on = collections.Counter()
        for run in some:
            on[run["hosts"]] += len(run["faults"])
        ended = [run for run in some if not run["failed"]]
        equal = sum(run["weights_equal"] for run in ended)
        end = f"equal in {equal} of {len(ended)} jobs" if ended else "not compared"
        if is_refitted and ended:
            worst = max(run["losses_differ_by"] for run in ended)
            end = f"losses within {worst:.0e} in {len(ended)}"
        also = ", and with fewer" if is_refitted else ""
        rows.append([f"`{layout}`{also}", on[1] or "", on[2] or "", end])
    return _rows(["layout", "faults on one host", "on two hosts", "final weights"], rows)


def _rows(heads, rows):
    cells = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in cells)


def _span(numbers):
    if not numbers:
        return ""
    low, high = (f"{one:.0f}" for one in (min(numbers), max(numbers)))
    return low if low == high else f"{low}–{high}"
