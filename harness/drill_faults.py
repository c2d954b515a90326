"""What goes wrong in drills: each fault begins when it is made, and some are mended afterwards."""

import contextlib
import os
import pathlib
import signal
import subprocess
import time

SECONDS_TO_SEE = 60


class Fault:
    """Something that goes wrong.

    Args:
        run: the `Run` of benchmarks/drills.py.
        disk: the `Disk` that it saves to.

    Attributes:
        at: the moment.
    """

    def __init__(self, run, disk):
        self.run, self.disk, self.at = run, disk, None
        self.begin()
        self.at = self.at or time.time()

    def begin(self):
        """Let it happen."""
        raise NotImplementedError

    def mend(self):
        """Put in order what does not come right by itself."""


def _signal(name, number, *ranks):
    """Return a fault: a signal to some ranks, of which -1 is the last."""

    class Sent(Fault):
        def begin(self):
            num_ranks = self.run.layout.ranks
            self.at = time.time()
            for rank in ranks or range(num_ranks):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.run.pid(rank % num_ranks), number)

    Sent.__name__ = name
    return Sent


class KillWhileSaving(Fault):
    """The last rank is killed while a checkpoint is not complete."""

    def begin(self):
        folder, end = self.run.folder / "checkpoints", time.time() + SECONDS_TO_SEE
        while not any(folder.glob("step-*.unfinished")) and time.time() < end:
            time.sleep(0.0005)
        self.at = time.time()
        os.kill(self.run.pid(self.run.layout.ranks - 1), signal.SIGKILL)


class KillWhileStarting(Fault):
    """A rank is killed, and again as soon as it has begun anew."""

    def begin(self):
        rank = self.run.layout.ranks - 1
        pid, self.at = self.run.pid(rank), time.time()
        os.kill(pid, signal.SIGKILL)
        end = time.time() + 3 * SECONDS_TO_SEE
        while self.run.pid(rank) == pid and time.time() < end:
            time.sleep(0.01)
        os.kill(self.run.pid(rank), signal.SIGKILL)


class DiskFull(Fault):
    """Nothing more can be written where checkpoints are."""

    def begin(self):
        self.disk.fill()

    def mend(self):
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
        ranks = self.run.layout.ranks
        pids = [self.run.pid(rank) for rank in range(ranks // 2, ranks)]
        self.run.hosts.set_link(False)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)


class HostBack(Fault):
    """The second host answers again, and a rank of the first is killed: all go on."""

    def begin(self):
        self.run.hosts.set_link(True)
        time.sleep(10)  # longer than hosts are left out for
        self.at = time.time()
        os.kill(self.run.pid(0), signal.SIGKILL)


FAULTS = {
    "kill": _signal("Kill", signal.SIGKILL, -1),
    "kill-chief": _signal("KillChief", signal.SIGKILL, 0),
    "kill-all": _signal("KillAll", signal.SIGKILL),
    "freeze": _signal("Freeze", signal.SIGSTOP, -1),
    "freeze-chief": _signal("FreezeChief", signal.SIGSTOP, 0),
    "crash": _signal("Crash", signal.SIGSEGV, -1),
    "preempt": _signal("Preempt", signal.SIGUSR1, -1),
    "terminate": _signal("Terminate", signal.SIGTERM, 0),
    "kill-saving": KillWhileSaving,
    "kill-starting": KillWhileStarting,
    "disk-full": DiskFull,
    "cut": Cut,
    "one-way": OneWay,
    "other-way": OtherWay,
    "host-gone": HostGone,
    "host-back": HostBack,
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
        with contextlib.suppress(OSError), open(self._folder / "filler", "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    def free(self):
        """Make room again."""
        (self._folder / "filler").unlink()
