"""Fixtures: a trained trainer and two of its checkpoints."""

import pytest

from tests.trainers.checkpoint.small import dataset, new_trainer


@pytest.fixture(scope="module")
def trained():
    """Return a trainer after one epoch. Tests must not change it."""
    trainer = new_trainer()
    trainer.fit(dataset(), verbose=0)
    return trainer


@pytest.fixture
def two_checkpoints(trained, tmp_path):
    """Return a folder with checkpoints of steps 6 and 7, which have the same state."""
    for step in (6, 7):
        trained.save(tmp_path / f"step-{step:08d}")
    return tmp_path
