"""Only `dtransformer/_compat` uses private names of TensorFlow and Keras, and they work.

If a test fails after an update, `dtransformer/_compat` explains the purpose of the name and how to
avoid it.
"""

import ast
import collections
import functools
import gc
import logging
import pathlib
import re
import sys
import threading
import time
import types

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import error_interpolation

from dtransformer import _compat
from dtransformer._compat import tensorflow_internals
from dtransformer.trainers.optimizer.parameter_proxy import ParameterProxy

COMPAT = pathlib.Path(_compat.__file__).parent
PACKAGE = COMPAT.parent
PRIVATE_MODULES = ("keras.src", "tensorflow.python", "tensorflow.dtensor", "horovod.common")
NAMEDTUPLES = {"_asdict", "_fields", "_make", "_replace"}  # public, despite their names
# Private names that only subclasses of a Keras class override or read on `self`, as subclasses in
# Keras do. Public hooks for the storage of variables and for custom steps would replace them.
SUBCLASS_HOOKS = {
    keras.Variable: (
        "_direct_assign",  # writes the value
        "_dtype",  # dtype of the stored value; `dtype` may be autocast
        "_initialize_with_initializer",  # creates the value
        "_maybe_autocast",  # casts the value on read
        "_shape",  # known before the value exists
        "_value",  # `None` if the value is stored elsewhere
    ),
    keras.layers.Layer: (
        "_non_trainable_variables",  # without variables of sublayers
        "_track_variable",  # adds a variable of a custom class
        "_trainable_variables",
    ),
    keras.optimizers.Muon: (
        "_get_variable_index",
        "_muon_update_step",  # update of a matrix
        "_should_use_adamw",  # which update a weight has
    ),
    keras.Model: (
        "_compile_metrics",  # container of the metrics given to `compile`
    ),
}
HOOKS = {name for names in SUBCLASS_HOOKS.values() for name in names}


@functools.cache
def trees():
    paths = sorted(set(PACKAGE.rglob("*.py")) - set(COMPAT.glob("*.py")))
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def compat_trees():
    return [ast.parse(path.read_text(encoding="utf-8")) for path in COMPAT.glob("*.py")]


def private_attributes(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.match(r"_[^_]", node.attr):
            yield node


def defined_names(trees):
    """Return the names of functions, classes, variables and attributes that the package defines."""
    names = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if is_on_self(node):
                names.add(node.attr)
    return names


def is_on_self(attribute):
    return ast.unparse(attribute.value) in ("self", "cls", "super()")


# --- Private names outside of _compat. ---


def test_no_private_module_is_imported():
    for path, tree in trees().items():
        for node in ast.walk(tree):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [f"{node.module}.{alias.name}" for alias in node.names]
            for module in modules:
                assert not f"{module}.".startswith(tuple(f"{m}." for m in PRIVATE_MODULES)), (
                    f"{path}:{node.lineno} imports {module}: do so in dtransformer/_compat"
                )


def test_no_foreign_private_attribute_is_used():
    trees_by_path = trees()
    package_names = defined_names(trees_by_path.values())
    private_names = {node.attr for tree in compat_trees() for node in private_attributes(tree)}
    for path, tree in trees_by_path.items():
        for node in private_attributes(tree):
            if is_on_self(node) and (node.attr in HOOKS or node.attr in package_names):
                continue
            assert node.attr in NAMEDTUPLES or node.attr in package_names - private_names - HOOKS, (
                f"{path}:{node.lineno} uses {ast.unparse(node)}, which the package does not "
                "define: use a function of dtransformer/_compat"
            )
        for node in ast.walk(tree):  # getattr and the like
            assert not (isinstance(node, ast.Constant) and node.value in private_names), (
                f"{path}:{node.lineno} names {node.value!r}: use a function of dtransformer/_compat"
            )


def test_compat_has_no_unused_names():
    text = "\n".join(path.read_text(encoding="utf-8") for path in trees())
    body = [node for tree in compat_trees() for node in tree.body]
    names = [node.name for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    names += [alias.name for node in body if isinstance(node, ast.ImportFrom)
              for alias in node.names if alias.asname]  # fmt: skip
    unused = [name for name in names if name[0] != "_" and f"_compat.{name}" not in text]
    assert unused == []
    hooks = [name for name in HOOKS if not re.search(rf"\b(self|super\(\)|def )\.?{name}\b", text)]
    assert hooks == []


# --- Keras: hooks of subclasses. ---


def test_hooks_of_variables():
    calls = []

    class Recorded(keras.Variable):
        def _initialize_with_initializer(self, initializer):
            calls.append(("made", self._shape, self._dtype))
            self._value = None

        def _direct_assign(self, value):
            calls.append(("assigned", float(tf.reduce_sum(value))))

    variable = Recorded(keras.initializers.Ones(), shape=(2, 3), dtype="float16")
    variable.assign(np.full((2, 3), 2.0))
    assert calls == [("made", (2, 3), "float16"), ("assigned", 12.0)]


@pytest.mark.parametrize(
    "kind, make",
    [
        (keras.Variable, lambda: keras.Variable(1.0)),
        (keras.layers.Layer, lambda: keras.layers.Layer()),
        (keras.optimizers.Muon, lambda: keras.optimizers.Muon()),
        (keras.Model, lambda: keras.Model()),
    ],
)
def test_hooks_exist(kind, make):
    instance = make()
    missing = [name for name in SUBCLASS_HOOKS[kind] if not hasattr(instance, name)]
    assert missing == []


def test_layers_track_custom_variable_classes():
    layer = keras.layers.Layer()
    for trainable in (True, False):
        layer._track_variable(keras.Variable(1.0, trainable=trainable))
    assert (len(layer.trainable_weights), len(layer.non_trainable_weights)) == (1, 1)
    assert len(layer._trainable_variables) == len(layer._non_trainable_variables) == 1


def test_hooks_of_the_trainer():
    model = keras.Sequential([keras.layers.Dense(1)])
    with pytest.raises(ValueError, match="compile"):
        model._assert_compile_called("fit")
    model.compile(loss="mse")
    assert model._compile_metrics is None
    assert model._loss_tracker is model.metrics[0]
    model.compile(loss="mse", metrics=["mae"])
    assert any(metric is model._compile_metrics for metric in model.metrics)


# --- Keras: functions. ---


def test_stateless_value():
    variable, other = keras.Variable(1.0), keras.Variable(2.0)
    assert _compat.stateless_value(variable) is None
    with keras.StatelessScope([(variable, 3.0)]):
        assert float(_compat.stateless_value(variable)) == 3.0
        assert _compat.stateless_value(other) is None
    assert _compat.stateless_value(variable) is None


class Probe(keras.layers.Layer):
    """Layer that calls a function in its `call` and stores the result."""

    def __init__(self, function, **kwargs):
        super().__init__(**kwargs)
        self.function = function

    def build(self, shape):
        self.weight = self.add_weight(shape=(2,), name="weight")

    def call(self, x):
        self.found = self.function(self)
        return x


def test_in_symbolic_scope():
    layer = Probe(lambda _: _compat.in_symbolic_scope())
    layer(tf.zeros([1, 2]))
    assert not layer.found
    layer(keras.Input((2,)))
    assert layer.found


def test_autocast():
    def dtypes(layer):
        cast = _compat.autocast(layer.weight, tf.zeros([2]))
        with _compat.autocast_to(None):
            return cast.dtype, tf.convert_to_tensor(layer.weight.value).dtype

    layer = Probe(dtypes, dtype="mixed_bfloat16")
    layer(tf.zeros([1, 2]))
    assert layer.found == (tf.bfloat16, tf.float32)
    assert _compat.autocast(layer.weight, tf.zeros([2])).dtype == tf.float32


def test_optimizers_identify_shards_by_variable_key():
    owners = [keras.Variable(np.ones(4, "float32"), name=name) for name in ("a", "b")]
    assert len({_compat.variable_key(owner.value) for owner in owners}) == 2
    flat = [ParameterProxy(owner, (2,)) for owner in owners]
    optimizer = keras.optimizers.SGD(1.0, momentum=0.9)
    optimizer.build(flat)
    flat[1].bind(tf.ones([2]))
    optimizer.apply([tf.ones([2])], [flat[1]])
    np.testing.assert_array_equal(flat[1].unbind(), [0.0, 0.0])
    momenta = [v.numpy().tolist() for v in optimizer.variables if v.shape == (2,)]
    assert momenta == [[0, 0], [-1, -1]], "the state of the other shard must not change"


def test_optimizer_states():
    weights = [keras.Variable(np.ones(2, "float32")) for _ in range(3)]
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(weights)
    states = _compat.optimizer_states(optimizer)
    assert states["iterations"] is optimizer.iterations
    assert states["learning_rate"] is optimizer.learning_rate
    lists = {name: value for name, value in states.items() if isinstance(value, list)}
    assert [v.shape for v in lists.pop("momentums")] == [(2,)] * 3
    assert not lists
    adam = keras.optimizers.AdamW()
    adam.build(weights)
    assert {"momentums", "velocities"} <= _compat.optimizer_states(adam).keys()


def nested():
    inner = keras.Sequential([keras.layers.Dense(2, name="deep")], name="inner")
    return keras.Sequential([inner, keras.layers.Dense(3, name="last")], name="outer")


def test_flat_layers():
    network = nested()
    names = lambda **options: [layer.name for layer in _compat.flat_layers(network, **options)]
    assert set(names()) == {"outer", "inner", "deep", "last"}
    assert names()[0] == "outer" and names().index("inner") < names().index("deep")
    assert set(names(include_self=False)) == {"inner", "deep", "last"}
    assert set(names(include_self=False, recursive=False)) == {"inner", "last"}


def test_own_variables():
    network = nested()
    network.build((1, 4))
    assert [len(_compat.direct_variables(layer)) for layer in network.layers] == [0, 2]
    normalization = keras.layers.BatchNormalization()
    normalization.build((1, 4))
    assert _compat.direct_variables(normalization) == normalization.weights


def test_current_path():
    with keras.name_scope("outer"):
        assert _compat.current_path() == "outer"


def test_to_snake_case():
    for kind in (keras.layers.Dense, keras.layers.LayerNormalization, keras.layers.GRUCell):
        arguments = [2] if kind is not keras.layers.LayerNormalization else []
        name = kind(*arguments).name
        assert re.fullmatch(rf"{_compat.to_snake_case(kind.__name__)}(_\d+)?", name), name


def test_optimizers_clip_by_public_attributes():
    """The sharded optimizer removes them while it updates shards."""
    weight = keras.Variable(np.zeros(1, "float32"))
    optimizer = keras.optimizers.SGD(1.0, clipvalue=0.5)
    optimizer.apply([tf.constant([4.0])], [weight])
    optimizer.clipvalue = None
    optimizer.apply([tf.constant([4.0])], [weight])
    assert float(weight.value[0]) == -4.5


# --- TensorFlow. ---


def test_with_cardinality():
    data = tf.data.Dataset.from_tensor_slices(np.ones((4, 1, 2), "float32"))
    data = _compat.with_cardinality(data.map(lambda x: (x, x)), 7)
    assert int(data.cardinality()) == 7
    assert len(list(data)) == 4
    model = keras.Sequential([keras.layers.Dense(2)])
    model.compile(loss="mse")
    steps = []
    watch = keras.callbacks.LambdaCallback(on_epoch_begin=lambda *_: steps.append(watch.params))
    with pytest.warns(UserWarning, match="ran out of data"):
        model.fit(data, verbose=0, callbacks=[watch])
    assert steps[0]["steps"] == 7, "Keras must read the cardinality"


def test_expect_many_traces():
    texts = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())
    logger, level = tf.get_logger(), tf.get_logger().level
    logger.addHandler(handler)
    logger.setLevel("WARNING")
    try:
        for wrap in (_compat.expect_many_traces, lambda function: function):
            assert not texts
            function = wrap(tf.function(lambda x: x + 1, autograph=False))
            for size in range(20):
                function(tf.zeros([size]))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert any("retracing" in text for text in texts), (
        "TensorFlow no longer warns, so remove expect_many_traces"
    )


def test_called_by_shapes(monkeypatch):
    Pair = collections.namedtuple("Pair", ["second", "first"])
    shapes = []

    def compute(same, inputs, pair, none):
        shapes.append(inputs["b"].shape)
        return {"z": same[0] + inputs["b"], "a": pair.first - 2.0 * pair.second + inputs["a"]}

    traced = tf.function(compute, autograph=False)
    fast = _compat.cache_by_shapes(traced)
    for size in (2, 3, 2, 3, 2):
        inputs = {"b": tf.random.normal([size]), "a": tf.random.normal([size])}
        same, pair = [tf.random.normal([1])], Pair(tf.random.normal([]), tf.random.normal([]))
        result, expected = fast(same, inputs, pair, None), compute(same, inputs, pair, None)
        shapes.pop()
        tf.nest.map_structure(np.testing.assert_allclose, result, expected)
    assert shapes == [(2,), (3,)]
    monkeypatch.setattr(tf.config, "functions_run_eagerly", lambda: True)
    assert fast(same, inputs, pair, None)["z"].shape == (2,)


def test_call_of_function():
    """A waiting function is reported as the same call. Python code is reported as `None`."""
    fifo = tf.queue.FIFOQueue(1, "int32")
    dequeue, main, calls = tf.function(fifo.dequeue), threading.main_thread(), []

    def observe():
        for _ in range(100):
            calls.append(_compat.current_function_call(main))
            time.sleep(0.02)
            if len(calls) > 5 and calls[-1] is not None and calls[-1] == calls[-3]:
                break
        fifo.enqueue(1)

    thread = threading.Thread(target=observe)
    thread.start()
    dequeue()
    thread.join()
    (_, place) = calls[-1]
    assert "tests/test_compat.py, line" in place and calls[-1] == calls[-2]
    assert _compat.current_function_call(main) is None


def test_is_on_a_tape():
    x, other = tf.zeros([2]), tf.zeros([2])
    assert not _compat.is_on_a_tape([x])
    with tf.GradientTape() as tape:
        tape.watch(x)
        assert _compat.is_on_a_tape([other, x + 1]) and not _compat.is_on_a_tape([other])


def test_function_lookup_by_name():
    inner = tf.function(lambda x: tf.reshape(x, [6]) + 1.0, autograph=False)
    outer = tf.function(lambda x: inner(x) * 2.0, autograph=False)
    concrete = outer.get_concrete_function(tf.TensorSpec([2, 3]))
    (called,) = [
        operation.node_def.attr["f"].func.name
        for operation in concrete.graph.get_operations()
        if "PartitionedCall" in operation.type
    ]
    graph = _compat.get_function_graph(concrete.graph, called)
    assert [6] in [op.outputs[0].shape for op in graph.get_operations() if op.outputs]
    assert _compat.get_function_graph(concrete.graph, "no_such_function") is None
    assert called in _compat.function_names()
    assert _compat.function_def(called).signature.name == called
    assert _compat.function_def("no_such_function") is None


def test_take_weights_unlocks_a_built_layer():
    class Late(keras.layers.Layer):
        is_here = False

        def build(self, input_shape):
            if self.is_here:
                self.kernel = self.add_weight(shape=(1,))

    layer = Late()
    layer.build(None)
    layer.is_here = True
    with pytest.raises(ValueError, match="cannot add new elements of state"):
        layer.build(None)
    _compat.unlock_layer(layer)
    layer.build(None)
    assert layer.weights


def test_replace_layer_removes_the_old_weights():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    outer = keras.Model(model.inputs, model.outputs)
    outer.head = keras.layers.Dense(1)
    outer.head.build((None, 3))
    assert len(outer.variables) == 4
    _compat.replace_layer(outer, "head", keras.layers.Dense(5, use_bias=False))
    outer.head.build((None, 3))
    assert [tuple(x.shape) for x in outer.variables] == [(2, 3), (3,), (3, 5)]
    _compat.replace_layer(outer, "head", None)
    assert outer.head is None and len(outer.variables) == 2


def test_constants_are_copied():
    def captures():
        with tf.Graph().as_default():
            order = tf.constant([1, 0])
            function = tf.function(lambda: tf.transpose(tf.zeros([2, 3]), order), autograph=False)
            return len(function.get_concrete_function().captured_inputs)

    with _compat.copy_constants():
        assert captures() == 0
    assert captures() == 1, (
        "TensorFlow copies constants without the patch now, or the patch remains active"
    )


def test_captures_are_replaced():
    captured = tf.constant([1.0, 2.0])
    compute = lambda: tf.function(lambda: captured * 2.0, autograph=False)().numpy().tolist()
    with _compat.replace_captures(lambda tensor: tensor + 1.0):
        pass
    assert compute() == [2.0, 4.0], "the patch remains active"
    other = tf.constant([3.0, 4.0])
    with _compat.replace_captures(lambda tensor: other):
        assert compute() == [6.0, 8.0]


def test_is_compiled_by_xla():
    flags = []

    @tf.function(jit_compile=True, autograph=False)
    def compiled(x):
        inner = tf.function(lambda y: flags.append(_compat.is_compiled_by_xla()) or y)
        return tf.cond(x > 0, lambda: inner(x), lambda: x)

    compiled(tf.constant(1.0))
    tf.function(lambda: flags.append(_compat.is_compiled_by_xla()), autograph=False)()
    assert flags == [True, False]


def test_with_gradient_saves_only_tensors_that_the_gradient_reads():
    """`tf.custom_gradient` saves all arguments."""

    def outputs_and_gradients(custom):
        @tf.function(autograph=False)
        def inner(x, y):
            return custom(x + 1.0, y)

        @tf.function(autograph=False)
        def gradients(x, y):
            with tf.GradientTape() as tape:
                tape.watch([x, y])
                result = inner(x, y)
            return tape.gradient(result, [x, y])

        x = tf.constant([3.0, 5.0])
        graph = gradients.get_concrete_function(x, x).graph
        calls = [op for op in graph.get_operations() if op.type == "PartitionedCall"]
        return [len(op.outputs) for op in calls], [
            gradient.numpy().tolist() for gradient in gradients(x, x)
        ]

    formula = lambda x, y: (x * y, lambda dy: (0.5 * dy, y * dy))
    with_gradient = lambda x, y: _compat.with_gradient(formula, [x, y])
    expected = [[0.5, 0.5], [3.0, 5.0]]
    # The forward function also outputs y for the gradient. The backward function outputs two gradients.
    assert outputs_and_gradients(with_gradient) == ([2, 2], expected)
    assert outputs_and_gradients(tf.custom_gradient(formula)) == ([4, 2], expected)
    x = tf.constant([3.0, 5.0])
    with tf.GradientTape() as tape:
        tape.watch(x)
        result = tf.function(with_gradient)(x, x)
    assert tape.gradient(result, x).numpy().tolist() == [3.5, 5.5]


def test_forget_context_allows_deleting_old_functions(monkeypatch):
    errors = []
    monkeypatch.setattr(sys, "unraisablehook", errors.append)
    counts = tensorflow_internals.atomic_function.RUNTIME_FUNCTION_REFS

    def delete_a_forgotten_function():
        concrete = tf.function(lambda: tf.zeros([]), autograph=False).get_concrete_function()
        assert concrete() == 0
        tensorflow_internals.atomic_function.RUNTIME_FUNCTION_REFS.clear()  # a new context has none
        del concrete
        gc.collect()

    for forgets in (False, True):
        monkeypatch.setattr(
            tensorflow_internals.atomic_function, "RUNTIME_FUNCTION_REFS", dict(counts)
        )
        errors.clear()
        if forgets:
            _compat.forget_context()
        delete_a_forgotten_function()
        assert bool(errors) != forgets


def test_forget_context_clears_caches_of_the_mesh(monkeypatch):
    monkeypatch.setattr(
        tensorflow_internals.atomic_function,
        "RUNTIME_FUNCTION_REFS",
        dict(tensorflow_internals.atomic_function.RUNTIME_FUNCTION_REFS),
    )
    with tf.device("CPU:0"):
        tf.zeros([])
    assert tensorflow_internals.context._device_parsing_cache
    _compat.forget_context()
    assert not tensorflow_internals.context._device_parsing_cache
    device = types.SimpleNamespace(clear_tpu_core_ids=lambda: None)
    monkeypatch.setattr(tensorflow_internals.api, "_dtensor_singleton", device)
    _compat.forget_dtensor_device()
    assert tensorflow_internals.api._dtensor_singleton is None


def test_read_long_errors_is_fast_and_equal():
    """Results equal the results of TensorFlow, in linear instead of quadratic time."""
    unbalanced = "of {{node a}}{{function_node __f_1}} }} and {{odd {{node c}} end"
    texts = ["", "none", "{{node a/b}}", unbalanced]
    expected = [error_interpolation.parse_message(text) for text in texts]
    pattern_before = error_interpolation._INTERPOLATION_PATTERN
    try:
        _compat.read_long_errors()
        assert [error_interpolation.parse_message(text) for text in texts] == expected
        long = "%1 = {a} " * 10**5  # TensorFlow needs an hour
        assert error_interpolation.parse_message(long)[0] == long
    finally:
        error_interpolation._INTERPOLATION_PATTERN = pattern_before
