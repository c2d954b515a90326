"""What goes wrong in drills: each fault begins when it is made, and some are mended afterwards."""

import contextlib
import os
import pathlib
import signal
import subprocess
import threading
import time

from harness.drill_run import RESTART, STEP

SECONDS_TO_SEE = 60
_SECONDS_TO_START = 180


class Fault:
    """Something that goes wrong.

    Args:
        run: the `Run` of harness/drill_run.py.
        disk: the `Disk` that it saves to.

    Attributes:
        at: the moment.
        seen: the pattern of a line by which it is seen.
    """

    seen = RESTART

    def __init__(self, run, disk):
        self.run, self.disk, self.at = run, disk, None
        self.begin()
        self.at = self.at or time.time()

    def begin(self):
        """Let it happen."""
        raise NotImplementedError

    def mend(self):
        """Put in order what does not come right by itself."""

    def signal(self, number, *ranks, name="pids"):
        """Send a signal to ranks, of which -1 is the last."""
        self.at = self.at or time.time()
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.run.pid(rank % self.run.num_ranks, name), number)


def _signal(name, number, *ranks):
    """Return a fault: a signal to some ranks; to all by default."""

    class Sent(Fault):
        def begin(self):
            self.signal(number, *(ranks or range(self.run.num_ranks)))

    Sent.__name__ = name
    return Sent


def _order(name, text):
    """Return a fault: what the last rank is ordered to do in its next step."""

    class Ordered(Fault):
        def begin(self):
            self.run.order(self.run.num_ranks - 1, text)

    Ordered.__name__ = name
    return Ordered


class KillWhileSaving(Fault):
    """The last rank is killed while a checkpoint is not complete."""

    def begin(self):
        folder, end = self.run.folder / "checkpoints", time.time() + SECONDS_TO_SEE
        while not any(folder.glob("step-*.unfinished")) and time.time() < end:
            time.sleep(0.0005)
        self.signal(signal.SIGKILL, -1)


class TwiceInARow(Fault):
    """The last rank is killed, and killed again after the first step that follows."""

    def begin(self):
        self.signal(signal.SIGKILL, -1)
        self.run.wait_for(RESTART, SECONDS_TO_SEE)
        self.run.wait_for(STEP, _SECONDS_TO_START)
        self.at = None
        self.signal(signal.SIGKILL, -1)


class WhileStarting(Fault):
    """The last rank is killed, and fails again as soon as it has begun anew."""

    where, number = "begun", signal.SIGKILL

    def begin(self):
        rank = self.run.num_ranks - 1
        pid = self.run.pid(rank, self.where)
        self.signal(signal.SIGKILL, rank)
        self.run.wait_for(RESTART, SECONDS_TO_SEE)
        end = time.time() + _SECONDS_TO_START
        while self.run.pid(rank, self.where) == pid and time.time() < end:
            time.sleep(0.01)
        self.at = None
        self.signal(self.number, rank, name=self.where)


class WhileCompiling(WhileStarting):
    """The same, as soon as it begins to train, and compiles."""

    where = "pids"


class FreezeWhileStarting(WhileStarting):
    """The last rank is killed, and frozen as soon as it has begun anew: before it has joined."""

    number = signal.SIGSTOP


class FreezeWhileCompiling(WhileCompiling):
    """The same, as soon as it begins to train, and compiles."""

    number = signal.SIGSTOP


class DiskFull(Fault):
    """Nothing more can be written where checkpoints are, though old ones are removed."""

    def begin(self):
        self._is_over = threading.Event()

        def fill():
            while not self._is_over.wait(0.02):
                self.disk.fill()

        self._thread = threading.Thread(target=fill, daemon=True)
        self._thread.start()

    def mend(self):
        self._is_over.set()
        self._thread.join()
        self.disk.free()


class Cut(Fault):
    """The link between the two hosts is down until the job has ended on the first."""

    def begin(self):
        self.run.hosts.set_link(False)

    def mend(self):
        self.run.wait_for("does not answer", SECONDS_TO_SEE)
        self.run.hosts.set_link(True)


class OneWay(Fault):
    """What the second host sends is lost."""

    host = 1

    def begin(self):
        self._loss("add")

    def mend(self):
        self._loss("del")

    def _loss(self, action):
        self.run.hosts.set_loss(self.host, action)


class OtherWay(OneWay):
    """What the first host sends is lost."""

    host = 0


class HostGone(Fault):
    """All ranks of the second host are killed and it does not answer; it stays away."""

    def begin(self):
        half = self.run.num_ranks // 2
        pids = [self.run.pid(rank) for rank in range(half, self.run.num_ranks)]
        self.run.hosts.set_link(False)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)


class HostBack(Fault):
    """The second host answers again, and a rank of the first is killed: all go on."""

    def begin(self):
        self.run.hosts.set_link(True)
        time.sleep(10)  # longer than hosts are left out for
        self.signal(signal.SIGKILL, 0)


class Fewer(Fault):
    """A rank is killed, and half of the ranks can be started from then on."""

    def begin(self):
        self.run.give_slots(self.run.num_ranks // 2)
        self.signal(signal.SIGKILL, -1)


class More(Fault):
    """A rank is killed, and twice as many ranks can be started from then on."""

    def begin(self):
        self.run.give_slots(self.run.num_ranks * 2)
        self.signal(signal.SIGKILL, -1)


FAULTS = {
    "kill": _signal("Kill", signal.SIGKILL, -1),
    "kill-chief": _signal("KillChief", signal.SIGKILL, 0),
    "kill-all": _signal("KillAll", signal.SIGKILL),
    "freeze": _signal("Freeze", signal.SIGSTOP, -1),
    "freeze-chief": _signal("FreezeChief", signal.SIGSTOP, 0),
    "crash": _signal("Crash", signal.SIGSEGV, -1),
    "raise": _order("Raise", "raise"),
    "unequal": _order("Unequal", "unequal"),
    "preempt": _signal("Preempt", signal.SIGUSR1, -1),
    "terminate": _signal("Terminate", signal.SIGTERM, 0),
    "kill-saving": KillWhileSaving,
    "kill-starting": WhileStarting,
    "kill-compiling": WhileCompiling,
    "freeze-starting": FreezeWhileStarting,
    "freeze-compiling": FreezeWhileCompiling,
    "twice": TwiceInARow,
    "disk-full": DiskFull,
    "cut": Cut,
    "one-way": OneWay,
    "other-way": OtherWay,
    "host-gone": HostGone,
    "host-back": HostBack,
    "fewer": Fewer,
    "more": More,
}


class Disk:
    """A file system of its own for checkpoints, where one that can be filled is asked for.

    Args:
        folder: the run's folder.
        is_own: whether it is.
    """

    def __init__(self, folder, is_own):
        self._folder, self._is_own = pathlib.Path(folder) / "checkpoints", is_own

    def __enter__(self):
        if self._is_own:
            self._folder.mkdir(parents=True)
            subprocess.run(
                ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", self._folder], check=True
            )
        return self

    def __exit__(self, *error):
        if self._is_own:
            subprocess.run(["umount", "-l", self._folder], check=True)

    def fill(self):
        """Leave no byte."""
        with contextlib.suppress(OSError), open(self._folder / "filler", "ab", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    def free(self):
        """Make room again."""
        (self._folder / "filler").unlink()
