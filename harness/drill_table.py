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
    num_stopped = sum(bool(run["failed"]) for run in counted)
    num_faults = sum(ENDS in fault for run in runs for fault in run["faults"])
    parts = [_by_kind(runs), _by_layout(runs)]
    summary = (
        f"{num_faults} faults in {len(runs)} jobs. {num_stopped} jobs were stopped early by the user. "
        f"{len(failed)} jobs did not react as expected."
    )
    return "\n\n".join([*filter(None, parts), summary])


def _by_kind(runs):
    """Return a table with a row per kind of fault that ended in a restart."""
    settings = sorted({run["stall_seconds"] for run in runs}, reverse=True)
    kinds = collections.defaultdict(list)
    for run in runs:
        for fault in run["faults"]:
            if ENDS in fault:
                run_fields = {name: run[name] for name in ("hosts", "stall_seconds")}
                kinds[fault["fault"]].append(fault | run_fields)
    heads = ["fault", "on one host", "on two hosts"]
    heads += [f"ended after (s), {fault:.0f}" for fault in settings]
    rows = []
    for kind, faults in sorted(kinds.items()):
        num_by_hosts = collections.Counter(fault["hosts"] for fault in faults)
        spans = [
            _span([fault[ENDS] for fault in faults if fault["stall_seconds"] == setting])
            for setting in settings
        ]
        other_spans = [_span([fault[key] for fault in faults]) for key in (NEXT, LOST)]
        rows.append([kind, num_by_hosts[1] or "", num_by_hosts[2] or "", *spans, *other_spans])
    return _rows([*heads, "next step after (s)", "steps lost"], rows)


def _by_layout(runs):
    """Return a table with a row per layout, separately for jobs that may resume with fewer ranks."""
    groups = collections.defaultdict(list)
    for run in runs:
        groups[run["layout"], bool(run["min_ranks"])].append(run)
    rows = []
    for (layout, is_refitted), group_runs in sorted(groups.items()):
        num_by_hosts = collections.Counter()
        for run in group_runs:
            num_by_hosts[run["hosts"]] += len(run["faults"])
        ended = [run for run in group_runs if not run["failed"]]
        equal = sum(run["weights_equal"] for run in ended)
        end = f"equal in {equal} of {len(ended)} jobs" if ended else "not compared"
        if is_refitted and ended:
            worst = max(run["losses_differ_by"] for run in ended)
            end = f"losses within {worst:.0e} in {len(ended)}"
        suffix = ", and with fewer" if is_refitted else ""
        rows.append([f"`{layout}`{suffix}", num_by_hosts[1] or "", num_by_hosts[2] or "", end])
    return _rows(["layout", "faults on one host", "on two hosts", "final weights"], rows)


def _rows(heads, rows):
    cells = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in cells)


def _span(numbers):
    if not numbers:
        return ""
    low, high = (f"{value:.0f}" for value in (min(numbers), max(numbers)))
    return low if low == high else f"{low}–{high}"
