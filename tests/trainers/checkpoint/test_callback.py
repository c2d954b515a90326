"""`ModelCheckpoint` saves at the given intervals and keeps the last and the best checkpoints."""

import keras
import pytest

from dtransformer.errors import InputError
from dtransformer.trainers import ModelCheckpoint
from dtransformer.trainers.checkpoint import Checkpoint
from tests.trainers.checkpoint.small import dataset, new_trainer, saved_steps


class TestCallback:
    def test_saves_every_few_steps_and_keeps_the_last(self, tmp_path):
        checkpointing = ModelCheckpoint(tmp_path, every_steps=2, every_epochs=None, keep=2)
        new_trainer().fit(dataset(7), epochs=1, verbose=0, callbacks=[checkpointing])
        assert saved_steps(tmp_path) == [6, 7], "The last step must be saved."

    def test_saves_every_few_minutes(self, tmp_path):
        checkpointing = ModelCheckpoint(tmp_path, every_minutes=1e-9, every_epochs=None, keep=None)
        new_trainer().fit(dataset(), verbose=0, callbacks=[checkpointing])
        assert len(saved_steps(tmp_path)) > 2
        second_folder = tmp_path / "other"
        checkpointing = ModelCheckpoint(
            second_folder, every_minutes=60, every_epochs=None, keep=None
        )
        new_trainer().fit(dataset(), verbose=0, callbacks=[checkpointing])
        assert saved_steps(second_folder) == [6]

    def test_best_checkpoint_is_also_kept(self, tmp_path):
        class Score(keras.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                score = [3.0, 9.0, 5.0, float("nan"), 4.0][epoch]
                logs["val_bleu"] = keras.ops.convert_to_tensor(score)

        checkpointing = ModelCheckpoint(tmp_path, keep=1, monitor="val_bleu")
        new_trainer().fit(dataset(2), epochs=5, verbose=0, callbacks=[Score(), checkpointing])
        assert saved_steps(tmp_path) == [4, 10]
        assert Checkpoint(tmp_path / "step-00000004").manifest["metrics"]["val_bleu"] == 9.0

    def test_invalid_arguments_raise_errors(self, tmp_path):
        for options, message in (
            ({"every_steps": 0}, "every_steps must be an integer"),
            ({"every_minutes": 0}, "`every_minutes` must be greater than 0"),
            ({"mode": "best"}, "`mode` must be"),
        ):
            with pytest.raises(InputError, match=message):
                ModelCheckpoint(tmp_path, **options)
        checkpointing = ModelCheckpoint(tmp_path, monitor="val_los")
        with pytest.warns(UserWarning, match="'val_los'` is not in the logs"):
            new_trainer().fit(dataset(), verbose=0, callbacks=[checkpointing])

    def test_new_run_in_the_folder_of_an_older_run_raises_an_error(self, two_checkpoints):
        with pytest.raises(InputError, match=r"step 6, but training is at step 0. .*resume=True"):
            new_trainer().fit(dataset(), verbose=0, callbacks=[ModelCheckpoint(two_checkpoints)])
