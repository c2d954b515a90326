"""What all tests share: a clean parallel config, and the place of the real data."""

import os
import pathlib

import keras
import pytest

import dtransformer


@pytest.fixture(autouse=True)
def clean_state():
    """Every test starts outside of a job, with the default config, seed and precision."""
    yield
    dtransformer.set_parallel_config(dtransformer.TransformerOpParallelConfig())
    dtransformer.shutdown()
    dtransformer.set_seed(0)
    keras.config.set_dtype_policy("float32")


@pytest.fixture(scope="session")
def shared_data():
    """The folder of real data; skips where it is absent."""
    folder = pathlib.Path(os.environ.get("DTRANSFORMER_DATA", "../shared/data"))
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder}; name its place with DTRANSFORMER_DATA")
    return folder
