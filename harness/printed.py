"""Read the JSON objects that programs print on a single line."""

import json
import sys

from harness.launch import launch, tail


def json_with(word, output):
    """Return the JSON object in the first line that contains `word`, or `None`."""
    line = next((line for line in output.splitlines() if word in line), None)
    return None if line is None else json.loads(line[line.index("{") :])


def printed_json(name, num_ranks, arguments, word, timeout):
    """Run a Python program and return the JSON in the line with `word`. Exit if the program fails."""
    process = launch(num_ranks, arguments, timeout)
    if process.returncode:
        sys.exit(f"{name} failed:\n{tail(process.stdout, process.stderr)}")
    return json_with(word, process.stdout)


def run_programs(options, key, programs, word, timeout):
    """Run Python programs and return their results together with the options.

    Args:
        options: Dict of the benchmark's options.
        key: Key for the results in the returned dict.
        programs: Dict from names to `(num_ranks, arguments)`.
        word: Word in the JSON line that each program prints.
        timeout: Seconds per program.
    """
    report = {"options": options, key: {}}
    for name, (num_ranks, arguments) in programs.items():
        report[key][name] = printed_json(name, num_ranks, arguments, word, timeout)
        print(name, report[key][name], file=sys.stderr)
    return report
