"""Faults for drills. Each one starts when it is created, and some are repaired afterwards."""

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
    """A fault in a running job.

    Args:
        run: The `Run` of harness/drill_run.py.
        disk: The `Disk` with its checkpoints.

    Attributes:
        at: Time of the fault.
        seen: Pattern of the output line that proves its detection.
    """

    seen = RESTART

    def __init__(self, run, disk):
        self.run, self.disk, self.at = run, disk, None
        self.begin()
        self.at = self.at or time.time()

    def begin(self):
        """Cause the fault."""
        raise NotImplementedError

    def repair(self):
        """Repair the fault if the job cannot."""

    def signal(self, signal_number, *ranks, name="pids"):
        """Send a signal to ranks. The rank -1 is the last one."""
        self.at = self.at or time.time()
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.run.pid(rank % self.run.num_ranks, name), signal_number)


def _signal(name, signal_number, *ranks):
    """Return a fault class that sends a signal to some ranks, by default to all."""

    class Sent(Fault):
        def begin(self):
            self.signal(signal_number, *(ranks or range(self.run.num_ranks)))

    Sent.__name__ = name
    return Sent


def _order(name, text):
    """Return a fault class that gives the last rank an order for its next step."""

    class Ordered(Fault):
        def begin(self):
            self.run.order(self.run.num_ranks - 1, text)

    Ordered.__name__ = name
    return Ordered


class KillWhileSaving(Fault):
    """The last rank is killed while a checkpoint is incomplete."""

    def begin(self):
        folder, end = self.run.folder / "checkpoints", time.time() + SECONDS_TO_SEE
        while not any(folder.glob("step-*.unfinished")) and time.time() < end:
            time.sleep(0.0005)
        self.signal(signal.SIGKILL, -1)


class TwiceInARow(Fault):
    """The last rank is killed, and again after the first step that follows."""

    def begin(self):
        self.signal(signal.SIGKILL, -1)
        self.run.wait_for(RESTART, SECONDS_TO_SEE)
        self.run.wait_for(STEP, _SECONDS_TO_START)
        self.at = None
        self.signal(signal.SIGKILL, -1)


class WhileStarting(Fault):
    """The last rank is killed, and again as soon as its new process has started."""

    where, signal_number = "begun", signal.SIGKILL

    def begin(self):
        rank = self.run.num_ranks - 1
        pid = self.run.pid(rank, self.where)
        self.signal(signal.SIGKILL, rank)
        self.run.wait_for(RESTART, SECONDS_TO_SEE)
        end = time.time() + _SECONDS_TO_START
        while self.run.pid(rank, self.where) == pid and time.time() < end:
            time.sleep(0.01)
        self.at = None
        self.signal(self.signal_number, rank, name=self.where)


class WhileCompiling(WhileStarting):
    """Like `WhileStarting`, but the second fault comes when training starts and compiles."""

    where = "pids"


class FreezeWhileStarting(WhileStarting):
    """The last rank is killed, and its new process is frozen before it joins the job."""

    signal_number = signal.SIGSTOP


class FreezeWhileCompiling(WhileCompiling):
    """Like `FreezeWhileStarting`, but the process is frozen when training starts and compiles."""

    signal_number = signal.SIGSTOP


class DiskFull(Fault):
    """The disk of the checkpoints stays full, even when old checkpoints are removed."""

    def begin(self):
        self._is_over = threading.Event()

        def fill():
            while not self._is_over.wait(0.02):
                self.disk.fill()

        self._thread = threading.Thread(target=fill, daemon=True)
        self._thread.start()

    def repair(self):
        self._is_over.set()
        self._thread.join()
        self.disk.free()


class Cut(Fault):
    """The link between the two hosts is down until the job has ended on the first."""

    def begin(self):
        self.run.hosts.set_link(False)

    def repair(self):
        self.run.wait_for("does not answer", SECONDS_TO_SEE)
        self.run.hosts.set_link(True)


class OneWay(Fault):
    """All packets of the second host are lost."""

    host = 1

    def begin(self):
        self._loss("add")

    def repair(self):
        self._loss("del")

    def _loss(self, action):
        self.run.hosts.set_loss(self.host, action)


class OtherWay(OneWay):
    """All packets of the first host are lost."""

    host = 0


class HostGone(Fault):
    """All ranks of the second host are killed, and the host does not answer any more."""

    def begin(self):
        half = self.run.num_ranks // 2
        pids = [self.run.pid(rank) for rank in range(half, self.run.num_ranks)]
        self.run.hosts.set_link(False)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)


class HostBack(Fault):
    """The second host answers again and a rank of the first is killed. All ranks resume."""

    def begin(self):
        self.run.hosts.set_link(True)
        time.sleep(10)  # This is longer than the launcher excludes a failed host.
        self.signal(signal.SIGKILL, 0)


class Fewer(Fault):
    """A rank is killed, and only half of the ranks can be started afterwards."""

    def begin(self):
        self.run.give_slots(self.run.num_ranks // 2)
        self.signal(signal.SIGKILL, -1)


class More(Fault):
    """A rank is killed, and double the number of ranks can be started afterwards."""

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
    """File system for checkpoints: optionally a small separate one that can be filled.

    Args:
        folder: Folder of the run.
        is_own: Boolean, whether to mount a separate file system. This requires root.
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
        """Fill the disk completely."""
        with contextlib.suppress(OSError), open(self._folder / "filler", "ab", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    def free(self):
        """Free the filled space."""
        (self._folder / "filler").unlink()
