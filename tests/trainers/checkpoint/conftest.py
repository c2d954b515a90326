"""A trainer that has trained, and two checkpoints of it."""

import pytest

from tests.trainers.checkpoint.small import dataset, new_trainer


@pytest.fixture(scope="module")
def trained():
    """A trainer after an epoch. Tests do not change it."""
    trainer = new_trainer()
    trainer.fit(dataset(), verbose=0)
    return trainer


@pytest.fixture
def two(trained, tmp_path):
    """A folder with two checkpoints, and the state of both."""
    for step in (6, 7):
        trained.save(tmp_path / f"step-{step:08d}")
    return tmp_path
