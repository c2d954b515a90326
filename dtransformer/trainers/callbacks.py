"""Callbacks for `fit`: print losses, write a metrics file, compute sacreBLEU.

Only rank 0 prints and writes files. List a callback that adds to the logs (`SacreBleu`) before
callbacks that read them, such as `MetricsFile`, `keras.callbacks.EarlyStopping` and
`keras.callbacks.ModelCheckpoint`.
"""

import errno
import json
import math
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterable

import keras
import numpy as np
from sacrebleu.metrics import BLEU

from dtransformer.errors import InputError, check_int
from dtransformer.files import convert_write_errors
from dtransformer.parallel.runtime import job
from dtransformer.trainers.optimizer.gradient_norms import LAYER_NORM


class _StepCallback(keras.callbacks.Callback):
    """Callback that acts every `every` optimizer steps, also with `steps_per_execution`."""

    def __init__(self, every: int = 1):
        super().__init__()
        self.every = check_int("every", every)

    def on_train_begin(self, logs=None):
        self._step = self._num_steps()
        self._due = False

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch + 1

    def _num_steps(self):
        """Return the number of optimizer steps. A `Trainer` counts them on the host."""
        return getattr(self.model, "num_steps", None) or int(self.model.optimizer.iterations)

    def _is_due(self):
        """Return whether to act now: a multiple of `every` was passed and the logs are up to date.

        A `Trainer` reads its logs only every `log_every` steps, see `Trainer.compile`.
        """
        before = self._step
        self._step = self._num_steps()
        self._due |= self._step // self.every > before // self.every
        is_due = self._due and getattr(self.model, "logs_are_new", True)
        self._due &= not is_due
        return is_due


class LossMonitor(_StepCallback):
    """Prints the loss every `every` optimizer steps.

    With a `Trainer` this is the loss of the last step, `step_loss`. With other models it is `loss`,
    the mean since the epoch began.

    Args:
        every: Positive integer. Interval in optimizer steps. With `steps_per_execution`, or a
            `Trainer` with a larger `log_every`, the line is printed when the logs are next read.
            Defaults to `1`.

    Example:

    ```python
    model.fit(dataset, epochs=2, verbose=0, callbacks=[LossMonitor(every=20)])
    # epoch: 1 step: 20, loss is 9.1234
    ```
    """

    def on_train_batch_end(self, batch, logs=None):
        if self._is_due() and logs and "loss" in logs:
            loss = float(logs.get("step_loss", logs["loss"]))
            job.print_once(f"epoch: {self._epoch} step: {batch + 1}, loss is {loss:.4f}")


class TimeMonitor(keras.callbacks.Callback):
    """Prints the time of each epoch and its mean time per step, on rank 0.

    An epoch's time includes validation and compilation.

    Args:
        data_size: Positive integer. Number of steps per epoch, for the time per step. Defaults to
            the number of optimizer steps of the epoch.

    Example:

    ```python
    model.fit(dataset, epochs=2, verbose=0, callbacks=[TimeMonitor()])
    # Train epoch time: 5316.104 ms, per step time: 26.581 ms
    ```
    """

    def __init__(self, data_size: int | None = None):
        super().__init__()
        self.data_size = None if data_size is None else check_int("data_size", data_size)

    def on_epoch_begin(self, epoch, logs=None):
        self._num_batches = 0
        self._start = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        self._num_batches = batch + 1

    def on_epoch_end(self, epoch, logs=None):
        milliseconds = 1000 * (time.perf_counter() - self._start)
        per_step = milliseconds / (self.data_size or max(self._num_batches, 1))
        job.print_once(f"Train epoch time: {milliseconds:.3f} ms, per step time: {per_step:.3f} ms")


class MetricsFile(_StepCallback):
    """Appends the logs to a JSON Lines file, one object per line.

    Each object contains `kind` (`"step"`, `"epoch"` or the argument of `write`), `epoch` (from 1),
    `step` (the optimizer's step count, which continues when a run is resumed), `time` (seconds
    since 1970) and the logs as floats. A log with one of these four names is written as
    `logs.<name>`. JSON has no NaN or infinity, so the strings `"NaN"`, `"Infinity"` and
    `"-Infinity"` are written, which Python's `float` parses.

    Every line is written immediately. A resumed run appends to the file, after removing a last
    line that is incomplete because the process was killed. Steps that are repeated after resuming
    appear twice, and the later line is valid.

    Args:
        path: Path of the file. Missing parent folders are created.
        every: Positive integer. Interval in optimizer steps between lines of kind `"step"`. With a
            `Trainer` that has a larger `log_every`, a line is written when the logs are next read.
            Every epoch gets a line. Defaults to `1`.

    Raises:
        InputError: If a line cannot be written during training.

    Example:

    ```python
    model.fit(dataset, epochs=2, callbacks=[MetricsFile("run/metrics.jsonl", every=10)])
    # {"kind": "step", "epoch": 1, "step": 10, "time": 1760000000.0, "loss": 9.12}
    ```
    """

    def __init__(self, path: str | os.PathLike, every: int = 1):
        super().__init__(every)
        self.path = pathlib.Path(path)

    def on_train_begin(self, logs=None):
        super().on_train_begin(logs)
        if job.is_chief():
            with convert_write_errors(self.path):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                # Remove a last line that is incomplete.
                with open(self.path, "a+b") as file:
                    file.seek(0)
                    file.truncate(file.read().rfind(b"\n") + 1)

    def on_train_batch_end(self, batch, logs=None):
        if self._is_due():
            self.write("step", logs)

    def on_epoch_end(self, epoch, logs=None):
        self.write("epoch", logs)

    def write(self, kind: str, logs: dict | None) -> None:
        """Write a line during training. Only rank 0 writes.

        Args:
            kind: String, the value of `kind` in the line.
            logs: Dict of additional values, or `None`. Values that are not numbers are written as
                strings.

        Raises:
            InputError: If the line cannot be written.
        """
        if not job.is_chief():
            return
        record = {
            "kind": kind,
            "epoch": self._epoch,
            "step": int(self.model.optimizer.iterations),
            "time": time.time(),
        }
        reserved = tuple(record)
        for name, value in (logs or {}).items():
            record[f"logs.{name}" if name in reserved else name] = _json_value(value)
        line = (json.dumps(record, allow_nan=False) + "\n").encode()
        with convert_write_errors(self.path), open(self.path, "ab", buffering=0) as file:
            if file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class SacreBleu(keras.callbacks.Callback):
    """Translates a development set at the end of epochs and logs `val_bleu`.

    The score is sacreBLEU's corpus BLEU with its default settings, on detokenized text. All ranks
    call `translate`, because it may contain collectives, and all ranks receive the score in their
    logs, so callbacks that stop or save by it decide identically. Only rank 0 prints it.

    Reference:
        [Post, 2018](https://arxiv.org/abs/1804.08771), "A Call for Clarity in Reporting BLEU
        Scores"

    Args:
        source_sentences: Iterable of strings, the sentences to translate.
        references: Iterable of strings, one translation per source sentence. Or a list of such
            iterables, for several translations per sentence.
        translate: Function that takes a list of strings and returns their translations, an iterable
            of the same length.
        every: Positive integer. Interval in epochs: epochs `every`, `2 * every`, … are scored.
            The logs of other epochs have no `val_bleu`. Defaults to `1`.

    Attributes:
        score: The last score, a float from 0 to 100, or `None` before the first.
        signature: sacreBLEU's description of the metric, or `None` before the first score.

    Raises:
        InputError: If the numbers of sentences and references differ, or if `translate` is not
            callable.

    Example:

    ```python
    bleu = SacreBleu(sources, references, translate=translator)
    best = keras.callbacks.ModelCheckpoint(
        "best.weights.h5", monitor="val_bleu", mode="max", save_best_only=True,
        save_weights_only=True,
    )
    model.fit(dataset, epochs=5, callbacks=[bleu, best])
    # epoch: 1, BLEU = 23.45 (nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0)
    ```
    """

    def __init__(
        self,
        source_sentences: Iterable[str],
        references: Iterable[str] | Iterable[Iterable[str]],
        translate: Callable[[list[str]], Iterable[str]],
        every: int = 1,
    ):
        super().__init__()
        self.source_sentences = list(source_sentences)
        references = list(references)
        if not references or isinstance(references[0], str):
            self.references = [references]
        else:
            self.references = [list(r) for r in references]
        sizes = [len(reference) for reference in self.references]
        if not self.source_sentences or set(sizes) != {len(self.source_sentences)}:
            raise InputError(
                f"`source_sentences` has {len(self.source_sentences)} sentences and `references` "
                f"has {', '.join(map(str, sizes))}. Pass at least one sentence, and one reference "
                "for each in every list of references."
            )
        if not callable(translate):
            raise InputError(f"`translate` must be a function, received {translate!r}.")
        self.translate = translate
        self.every = check_int("every", every)
        self.score: float | None = None
        self.signature: str | None = None

    def on_epoch_end(self, epoch, logs=None):
        if (epoch + 1) % self.every:
            return
        translations = list(self.translate(list(self.source_sentences)))
        if len(translations) != len(self.source_sentences):
            raise ValueError(
                f"`translate` received {len(self.source_sentences)} sentences and returned "
                f"{len(translations)}. It must return one string for each sentence."
            )
        metric = BLEU()
        self.score = metric.corpus_score(translations, self.references).score
        self.signature = str(metric.get_signature())
        if logs is not None:
            logs["val_bleu"] = self.score
        job.print_once(f"epoch: {epoch + 1}, BLEU = {self.score:.2f} ({self.signature})")


# Logs that the progress bar hides. History and other callbacks receive all logs.
_LINE_METRICS = "learning_rate", "gradient_norm", "tokens_per_second"
_HIDDEN_METRICS = {*_LINE_METRICS, "gflops_per_second", "input_wait", "share_of_peak", "step_loss"}
_HIDDEN_PREFIXES = "epochs/", LAYER_NORM
_MAX_METRICS = 6


class _Rounded(float):
    """Float that Keras' progress bar prints without decimals."""

    def __truediv__(self, count):
        return _Rounded(float(self) / count)

    def __format__(self, spec):
        return f"{float(self):,.0f}"


class ProgressLog(keras.callbacks.ProgbarLogger):
    """Keras' progress bar, or lines of text if standard output is not a terminal.

    A line has at most six metrics, the loss first. An epoch has about ten lines, or one line
    every 100 steps if it has more than 1,000 steps. `fit(verbose=2)` prints one line per epoch.

    Args:
        has_metrics: Whether the bar shows all metrics. Otherwise it shows only the loss, `val_loss` at
            the end of an epoch, tokens per second and the remaining time, which fit on one line.
    """

    def __init__(self, has_metrics: bool = True):
        super().__init__()
        self._has_metrics = has_metrics

    def set_params(self, params: dict) -> None:
        super().set_params(params)
        self._has_step_lines = self.verbose == 1 and not sys.stdout.isatty()
        if self._has_step_lines:
            self.verbose = 2
        self._every = min(max((self.target or 1000) // 10, 1), 100)

    def on_train_batch_end(self, batch, logs=None):
        logs = self._select(logs)
        before = self.seen
        super().on_train_batch_end(batch, logs)
        job.has_open_line = self.verbose == 1
        is_due = self.seen // self._every > before // self._every
        if self._has_step_lines and is_due and self.seen != self.target:
            values = (f"{name}: {np.mean(value):.5g}" for name, value in logs.items())
            print(f"{self.seen}/{self.target or '?'}", *values, sep=" - ", flush=True)

    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, self._select(logs))
        job.has_open_line = False

    def _select(self, logs):
        logs = logs or {}
        names = ["loss", "val_loss"]
        if self._has_metrics or self.verbose != 1:
            names += [
                name
                for name in logs
                if name not in _HIDDEN_METRICS and not name.startswith(_HIDDEN_PREFIXES)
            ]
        if self.verbose != 1:
            names += _LINE_METRICS
        present = [name for name in dict.fromkeys(names) if name in logs]
        if self.verbose != 1:
            present = present[:_MAX_METRICS]
        selected = {name: logs[name] for name in present}
        if self.verbose == 1 and logs.get("tokens_per_second"):
            selected["tokens/s"] = _Rounded(logs["tokens_per_second"])
        return selected


def with_progress_log(callbacks: list, verbose: int | str) -> list:
    """Return `callbacks` with an additional `ProgressLog`.

    The list is returned unchanged if it contains a `keras.callbacks.ProgbarLogger` or if `verbose`
    is 0.
    """
    has_bar = any(isinstance(callback, keras.callbacks.ProgbarLogger) for callback in callbacks)
    return callbacks if has_bar or verbose == 0 else [*callbacks, ProgressLog()]


def _json_value(value):
    try:
        value = float(value)
    except (TypeError, ValueError):
        return str(value)
    return value if math.isfinite(value) else json.dumps(value)
