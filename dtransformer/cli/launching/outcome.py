"""Outcome of a start of horovodrun, from what it has printed: pure."""

import re

PREEMPTED, REFUSED = 75, 2  # exit codes of ranks

# What a rank's watchdog says, and what horovodrun does.
_VERDICT = re.compile(r"dtransformer: the job ends: (ranks? [\d, …]+ on hosts? ([^:]+): [^;]+);")
_HAS_ENDED = re.compile(r"^Process \d+ exit with status code [1-9-]")
_EXIT_CODE = re.compile(r"^Exit code: (-?\d+)")
_NO_HOST = re.compile(r"could not connect to some hosts via ssh|Connection refused|timed out")
_MAX_CAUSE = 200


class Outcome:
    """What is known of a start that has ended, or will; lines of its output are given one by one."""

    def __init__(self):
        self.exit_code = None  # of the rank that ended first
        self.is_over = False  # whether a rank has failed, so that all will end
        self.hosts = ()  # at fault
        self.cause = ""
        self._in_traceback = False

    def read(self, line: str) -> bool:
        """Take a line of horovodrun's output, or of a rank's; return whether it is to be shown.

        Where horovodrun itself was when it saw a rank fail tells nobody anything.
        """
        begins = line.startswith("Traceback (most recent call last)")
        self._in_traceback = begins or (self._in_traceback and line.startswith("  "))
        self.is_over |= bool(_VERDICT.search(line) or _HAS_ENDED.search(line))
        if found := _EXIT_CODE.search(line):
            self.exit_code = int(found[1])
        elif found := _VERDICT.search(line):
            self.cause = self.cause or found[1][:_MAX_CAUSE]
            self.hosts = self.hosts or tuple(found[2].replace(", …", "").split(", "))
        elif not self.cause and _NO_HOST.search(line):
            self.cause = line.strip()[:_MAX_CAUSE]
        return not self._in_traceback

    @property
    def is_preempted(self) -> bool:
        """Whether ranks were asked to stop, and have saved."""
        return self.exit_code == PREEMPTED

    @property
    def is_refused(self) -> bool:
        """Whether the command refused its options, which it would do again."""
        return self.exit_code == REFUSED

    def __str__(self):
        if self.is_preempted:
            return "ranks were asked to stop, and have saved"
        code = "" if self.exit_code is None else f"a rank has ended with code {self.exit_code}"
        return self.cause or code or "horovodrun has failed"
