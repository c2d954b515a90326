"""Scoped values nest, end with their block and are separate for each thread."""

import threading

import pytest

from dtransformer.parallel.tracing import trace
from dtransformer.parallel.tracing.trace import Scoped


def test_scope_ends_with_its_block_even_after_an_error():
    with pytest.raises(KeyError):
        with trace.on_mesh(), trace.with_gradients(False):
            assert trace.is_on_mesh() and not trace.has_gradients()
            with trace.on_mesh(False):
                assert not trace.is_on_mesh() and not trace.has_gradients()
            assert trace.is_on_mesh()
            raise KeyError
    assert trace.has_gradients() and not trace.is_on_mesh()


def test_threads_have_separate_values():
    values = []
    with trace.on_mesh():
        thread = threading.Thread(target=lambda: values.append(trace.is_on_mesh()))
        thread.start()
        thread.join()
        assert trace.is_on_mesh()
    assert values == [False]


def test_default_value_and_yielded_value():
    scoped = Scoped("example", default=1)
    with scoped.set(2) as value:
        assert value == scoped.get() == 2
    assert scoped.get() == 1
