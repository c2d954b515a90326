"""Preemption: all ranks save at the same step and exit when a scheduler announces the end."""

import contextlib
import signal
import threading
from collections.abc import Iterator, Sequence

import keras

from dtransformer.parallel.runtime import job, stopping
from dtransformer.trainers.checkpoint.callback import ModelCheckpoint

EXIT_CODE = 75  # `EX_TEMPFAIL` of sysexits.h: the job should be started again.
# Kubernetes and most schedulers send SIGTERM. Slurm sends the signal that `--signal` requests.
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class SaveAndExit(keras.callbacks.Callback):
    """Callback that saves and exits when the ranks have agreed to stop.

    It checks before each step and at the end of `fit`.

    Args:
        saving: The `ModelCheckpoint` that saves.
    """

    def __init__(self, saving: ModelCheckpoint):
        super().__init__()
        self._saving = saving

    def on_train_batch_begin(self, batch: int, logs: dict | None = None) -> None:
        self._exit_if_requested()

    def on_train_end(self, logs: dict | None = None) -> None:
        self._exit_if_requested()

    def _exit_if_requested(self):
        if stopping.passes_gate():
            return
        step = self._saving.save_now()
        job.print_once(f"Stopping on request. Saved step {step} in {self._saving.folder}.")
        job.barrier()
        # horovodrun kills all other ranks when the first rank exits. Ignore the signals until then.
        for signum in _SIGNALS:
            signal.signal(signum, signal.SIG_IGN)
        raise SystemExit(EXIT_CODE)


@contextlib.contextmanager
def stop_on_signals(
    callbacks: Sequence[keras.callbacks.Callback],
) -> Iterator[list[keras.callbacks.Callback]]:
    """Make all ranks save and exit if one receives SIGTERM or SIGUSR1 in the `with` block.

    The signals keep their default effect without exactly one `ModelCheckpoint`, without a watchdog
    through which ranks agree, and in threads other than the main thread.

    Args:
        callbacks: Callbacks of `fit`.

    Yields:
        List of callbacks to add.
    """
    saving = [callback for callback in callbacks if isinstance(callback, ModelCheckpoint)]
    is_main = threading.current_thread() is threading.main_thread()
    if len(saving) != 1 or not stopping.can_stop() or not is_main:
        yield []
        return

    def request_stop(signum, frame):
        stopping.ask_to_stop()

    old_handlers = {signum: signal.signal(signum, request_stop) for signum in _SIGNALS}
    try:
        yield [SaveAndExit(saving[0])]
    finally:
        for signum, handler in old_handlers.items():
            # After an agreed stop the signals must stay ignored.
            if signal.getsignal(signum) is request_stop:
                signal.signal(signum, signal.SIG_DFL if handler is None else handler)
