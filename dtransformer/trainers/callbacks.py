"""Callbacks for `fit`: losses, a metrics file, sacreBLEU.

Only rank 0 prints and writes. A callback that adds to the logs (`SacreBleu`) must be listed before those
that read them, such as `MetricsFile`, `keras.callbacks.EarlyStopping` and
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
from dtransformer.files import writing
from dtransformer.parallel.runtime import job


class _StepCallback(keras.callbacks.Callback):
    """Counts the optimizer's steps, several at a time under `steps_per_execution`."""

    def __init__(self, every: int = 1):
        super().__init__()
        self.every = check_int("every", every)

    def on_train_begin(self, logs=None):
        self._step, self._due = self._num_steps(), False

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch + 1

    def _num_steps(self):
        """Return the number of the optimizer's steps, which a `Trainer` knows without asking it."""
        return getattr(self.model, "num_steps", None) or int(self.model.optimizer.iterations)

    def _is_due(self):
        """Return whether a line is due.

        That is once `every` was passed, and the trainer has read the logs (see `log_every` of its
        `compile`).
        """
        before, self._step = self._step, self._num_steps()
        self._due |= self._step // self.every > before // self.every
        is_due = self._due and getattr(self.model, "logs_are_new", True)
        self._due &= not is_due
        return is_due


class LossMonitor(_StepCallback):
    """Prints the loss of a step after every `every` steps.

    It is the log `step_loss` that `Trainer` has; with another model `loss`, which is the mean
    since the epoch began.

    Args:
        every: number of the optimizer's steps, at least 1. Under `steps_per_execution` the line comes
            after the call that passed it; where a `Trainer` reads its logs less often, once it does.

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


class MetricsFile(_StepCallback):
    """Appends the logs to a file of JSON lines, one object a line.

    An object has `kind` ("step", "epoch", or what `write` is given), `epoch` (from 1), `step` (the
    optimizer's steps since it was made, so that a resumed run goes on counting), `time` (seconds
    since 1970) and the logs as floats. JSON has no NaN: the texts `"NaN"`, `"Infinity"` and
    `"-Infinity"`, which Python's `float` reads, are written instead. A log that has one of the four
    names is written as `logs.<name>`.

    Every line is written at once. A run that is resumed appends; a last line that a
    kill left incomplete is removed first. Steps that a resumed run repeats are in the file
    twice, and the later line is the valid one.

    Args:
        path: the file; missing folders are made.
        every: number of the optimizer's steps between two step lines, at least 1; where a `Trainer`
            reads its logs less often, a line comes once it does. Epochs always get a line.

    Raises:
        InputError: during training, a line cannot be written.

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
            with writing(self.path):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with open(self.path, "a+b") as file:  # a last line that is not complete goes
                    file.seek(0)
                    file.truncate(file.read().rfind(b"\n") + 1)

    def on_train_batch_end(self, batch, logs=None):
        if self._is_due():
            self.write("step", logs)

    def on_epoch_end(self, epoch, logs=None):
        self.write("epoch", logs)

    def write(self, kind: str, logs: dict | None) -> None:
        """Write a line of a kind of its own, while training."""
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
        with writing(self.path), open(self.path, "ab", buffering=0) as file:
            if file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class SacreBleu(keras.callbacks.Callback):
    """Translates a development set at the end of epochs and logs `val_bleu`.

    The score is sacreBLEU's corpus BLEU with its default settings, on detokenized
    text. `translate` runs on every rank, as it may contain collectives, and every
    rank's logs get the score, so that callbacks which stop or save by it decide
    alike; only rank 0 prints it.

    Reference: Post, 2018, "A Call for Clarity in Reporting BLEU Scores".

    Args:
        source_sentences: the sentences to translate.
        references: the translation of each source sentence; or a list of such lists, where
            there are several translations of each.
        translate: a function of a list of strings that returns as many, translated.
        every: number of epochs, at least 1: the epochs 1 * every, 2 * every … are scored.
            The logs of others have no `val_bleu`.

    Attributes:
        score: the last score, a float from 0 to 100, or None.
        signature: sacreBLEU's description of how it was computed, or None.

    Raises:
        InputError: the numbers of sentences and references differ, or `translate` is no function.

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
        one_each = not references or isinstance(references[0], str)
        self.references = [references] if one_each else [list(r) for r in references]
        sizes = [len(reference) for reference in self.references]
        if not self.source_sentences or set(sizes) != {len(self.source_sentences)}:
            raise InputError(
                "source_sentences must not be empty and every list of references must be as "
                f"long, received {len(self.source_sentences)} sentences and references of "
                f"length {', '.join(map(str, sizes))}"
            )
        if not callable(translate):
            raise InputError(f"translate must be a function, received {translate!r}")
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
                "translate must return one string a sentence: it was given "
                f"{len(self.source_sentences)} and returned {len(translations)}"
            )
        metric = BLEU()
        self.score = metric.corpus_score(translations, self.references).score
        self.signature = str(metric.get_signature())
        if logs is not None:
            logs["val_bleu"] = self.score
        job.print_once(f"epoch: {epoch + 1}, BLEU = {self.score:.2f} ({self.signature})")


# Logs that Keras does not have. Only History and other callbacks get all of them.
_LINES_ONLY = "learning_rate", "gradient_norm", "tokens_per_second"
_HIDDEN = {*_LINES_ONLY, "gflops_per_second", "input_wait", "share_of_peak", "step_loss"}
_MAX_METRICS = 6


class _Rounded(float):
    """Float that Keras' progress bar prints without decimals."""

    def __truediv__(self, count):
        return _Rounded(float(self) / count)

    def __format__(self, spec):
        return f"{float(self):,.0f}"


class ProgressLog(keras.callbacks.ProgbarLogger):
    """Keras' progress bar, or lines if standard output is not a terminal.

    A line has at most six metrics, the loss first. An epoch has about ten lines, or one line
    every 100 steps if it is long. `fit(verbose=2)` prints one line for each epoch.

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
        logs, before = self._select(logs), self.seen
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
            names += [name for name in logs if name not in _HIDDEN]
        if self.verbose != 1:
            names += _LINES_ONLY
        present = [name for name in dict.fromkeys(names) if name in logs]
        if self.verbose != 1:
            present = present[:_MAX_METRICS]
        selected = {name: logs[name] for name in present}
        if self.verbose == 1 and logs.get("tokens_per_second"):
            selected["tokens/s"] = _Rounded(logs["tokens_per_second"])
        return selected


def with_progress_log(callbacks: list, verbose: int | str) -> list:
    """Return callbacks with a `ProgressLog`, unless they have one or `verbose` is 0."""
    has_bar = any(isinstance(x, keras.callbacks.ProgbarLogger) for x in callbacks)
    return callbacks if has_bar or verbose == 0 else [*callbacks, ProgressLog()]


def _json_value(value):
    try:
        value = float(value)
    except (TypeError, ValueError):
        return str(value)
    return value if math.isfinite(value) else json.dumps(value)  # such as "-Infinity"
