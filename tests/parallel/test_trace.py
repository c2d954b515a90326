"""The context of tracing: scopes nest, end with their block, and belong to one thread."""

import threading

import pytest

from dtransformer.parallel.tracing import trace


def test_a_scope_ends_with_its_block_even_after_an_error():
    outer = trace.current()
    with pytest.raises(KeyError):
        with trace.scope(on_mesh=True, has_gradients=False):
            assert trace.is_on_mesh() and not trace.current().has_gradients
            with trace.scope(on_mesh=False):
                assert not trace.is_on_mesh() and not trace.current().has_gradients
            raise KeyError
    assert trace.current() is outer and not trace.is_on_mesh()


def test_other_threads_have_their_own():
    seen = []
    with trace.scope(on_mesh=True):
        thread = threading.Thread(target=lambda: seen.append(trace.is_on_mesh()))
        thread.start()
        thread.join()
        assert trace.is_on_mesh()
    assert seen == [False]


def test_it_cannot_be_changed():
    with pytest.raises(AttributeError):
        trace.current().on_mesh = True
    with pytest.raises(TypeError):
        trace.current().rules["mlp"] = None


def test_a_field_that_does_not_exist():
    with pytest.raises(TypeError, match="mesh"):
        with trace.scope(mesh=True):
            pass
