"""What programs print for those that start them: an object in JSON, on a line of its own."""

import json
import sys

from harness.launch import launch, tail


def json_with(word, output):
    """Return the JSON object of the first line that has a word; None without one."""
    line = next((line for line in output.splitlines() if word in line), None)
    return None if line is None else json.loads(line[line.index("{") :])


def printed_json(name, num_ranks, arguments, word, timeout):
    """Run a Python program; return the JSON of the line with a word. End where it fails."""
    done = launch(num_ranks, arguments, timeout)
    if done.returncode:
        sys.exit(f"{name} failed:\n{tail(done.stdout, done.stderr)}")
    return json_with(word, done.stdout)


def report_of(options, key, programs, word, timeout):
    """Run Python programs; return the options, and under a key what each has printed.

    Args:
        options: dict of the benchmark's options.
        key: str, under which the results are.
        programs: dict of names and (number of ranks, arguments).
        word: a word of the line in JSON that a program prints.
        timeout: seconds of each.
    """
    report = {"options": options, key: {}}
    for name, (num_ranks, arguments) in programs.items():
        report[key][name] = printed_json(name, num_ranks, arguments, word, timeout)
        print(name, report[key][name], file=sys.stderr)
    return report
