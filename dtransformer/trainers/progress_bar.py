"""A progress bar that fits into a terminal."""

import keras

# What Keras' own logs do not have; it is in the History, in callbacks' logs and with verbose=2.
_ASIDE = {
    *("gflops_per_second", "gradient_norm", "input_wait", "learning_rate"),
    *("share_of_peak", "step_loss", "tokens_per_second"),
}


class ProgressBar(keras.callbacks.ProgbarLogger):
    """Keras' progress bar with losses and metrics alone; see `fit(verbose=1)`."""

    def on_train_batch_end(self, batch, logs=None):
        super().on_train_batch_end(batch, _shown(logs))

    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, _shown(logs))


def _shown(logs):
    return {name: value for name, value in (logs or {}).items() if name not in _ASIDE}
