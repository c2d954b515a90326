"""Signals that announce the end of a job's time: all ranks save at the same step, and leave."""

import contextlib
import signal
import threading
from collections.abc import Iterator, Sequence

import keras

from dtransformer.parallel.runtime import job, stopping
from dtransformer.trainers.checkpoint.callback import ModelCheckpoint

EXIT_CODE = 75  # a temporary failure, says <sysexits.h>: start again
# What schedulers send: Kubernetes and others the first, Slurm what `--signal` asks for.
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class SaveAndLeave(keras.callbacks.Callback):
    """Between two steps, and at the end of `fit`, sees whether ranks are to stop.

    Args:
        saving: what saves.
    """

    def __init__(self, saving: ModelCheckpoint):
        super().__init__()
        self._saving = saving

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        self._pass_gate()

    def on_train_end(self, logs: dict | None = None) -> None:
        self._pass_gate()

    def _pass_gate(self):
        if stopping.passes_gate():
            return
        step = self._saving.save_now()
        job.print_once(f"Asked to stop: saved at step {step} in {self._saving.folder}")
        job.barrier()
        for number in _SIGNALS:  # horovodrun ends with the first rank, and would kill the others
            signal.signal(number, signal.SIG_IGN)
        raise SystemExit(EXIT_CODE)


@contextlib.contextmanager
def signals_stop(
    callbacks: Sequence[keras.callbacks.Callback],
) -> Iterator[list[keras.callbacks.Callback]]:
    """Inside the `with` block SIGTERM and SIGUSR1, to any rank, let all ranks save and leave.

    Nothing changes where nothing saves, where ranks have no watchdog to agree by, and in threads
    other than the main one.

    Args:
        callbacks: those of `fit`.

    Yields:
        The callbacks to add to them.
    """
    saving = [one for one in callbacks if isinstance(one, ModelCheckpoint)]
    is_main = threading.current_thread() is threading.main_thread()
    if len(saving) != 1 or not stopping.can_stop() or not is_main:
        yield []
        return
    ask = lambda number, frame: stopping.ask_to_stop()
    before = {number: signal.signal(number, ask) for number in _SIGNALS}
    try:
        yield [SaveAndLeave(saving[0])]
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is ask:  # else training has stopped
                signal.signal(number, signal.SIG_DFL if handler is None else handler)
