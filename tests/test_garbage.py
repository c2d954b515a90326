"""What imports, and a step that is compiled, leave of Python's search for garbage."""

import gc
import subprocess
import sys

import keras
import numpy as np
import pytest

from dtransformer.garbage import garbage_waits
from dtransformer.trainers import Trainer


class _Asking(keras.layers.Dense):
    """Notes whether garbage is searched for when it is traced."""

    def build(self, input_shape):
        super().build(input_shape)
        self.searched = []

    def call(self, x):
        self.searched.append(gc.isenabled())
        return super().call(x)


def test_garbage_waits_while_the_first_step_is_compiled_and_no_longer():
    asking = _Asking(2)
    trainer = Trainer(keras.Sequential([keras.Input([3]), asking]))
    trainer.compile("sgd", "mse")
    asking.searched.clear()
    after = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: after_steps.append(gc.isenabled())
    )
    after_steps = []
    trainer.fit(np.ones([8, 3]), np.ones([8, 2]), batch_size=4, callbacks=[after], verbose=0)
    assert asking.searched and not any(asking.searched)
    assert after_steps == [True, True]


def test_what_was_set_holds_after_an_error_and_where_nothing_is_searched():
    with pytest.raises(ValueError, match="in a step"):
        with garbage_waits():
            assert not gc.isenabled()
            raise ValueError("in a step")
    assert gc.isenabled()
    gc.disable()
    try:
        with garbage_waits():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_nothing_is_searched_while_tensorflow_is_imported_and_all_is_afterwards():
    program = """
import gc
import dtransformer
before = gc.get_stats()[2]["collections"]
import dtransformer.start
print(gc.isenabled(), gc.get_stats()[2]["collections"] - before)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["True", "0"], done.stderr
