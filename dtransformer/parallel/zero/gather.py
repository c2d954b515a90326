"""All-gathers of weights that are stored as flat shards (`optimizer_shard=3`)."""

import contextlib
from collections.abc import Iterable, Sequence

import keras
import tensorflow as tf

from dtransformer import _compat
from dtransformer.parallel.collectives import flat_shards
from dtransformer.parallel.config.config import get_parallel_config
from dtransformer.parallel.runtime import job
from dtransformer.parallel.tracing.trace import Scoped
from dtransformer.parallel.weights.sharded_variable import is_unsharded_for_use
from dtransformer.parallel.weights.weight import trained_value

_unsharding = Scoped("unsharding")


def all_gather(
    variable: keras.Variable, shard: tf.Tensor, name: str, wait_for: Sequence[tf.Tensor] = ()
) -> tf.Tensor:
    """Return the full value of a variable from the shards of all ranks.

    Args:
        variable: Keras variable. Only its shape is used.
        shard: Flat tensor. Local shard of the value.
        name: String. Name of the collective, identical on all ranks.
        wait_for: Sequence of tensors that are computed before the shard is sent. Defaults to `()`.
    """
    with tf.control_dependencies(list(wait_for)):
        shard = tf.identity(shard)
    (value,) = flat_shards.all_gather(
        [shard], [tuple(variable.shape)], job.data_parallel_group(), name
    )
    return value


def reduce_scatter(gradient: tf.Tensor, name: str) -> tf.Tensor:
    """Return the flat local shard of a gradient's sum over the ranks in float32."""
    dtype = get_parallel_config().gradient_dtype
    gradient = tf.cast(tf.convert_to_tensor(gradient), "float32")
    (shard,) = flat_shards.reduce_scatter([gradient], job.data_parallel_group(), name, dtype)
    return shard


class Unsharding:
    """Sharded weights of one computation of the network.

    A unit (see `units`) all-gathers its weights itself. Every other weight is all-gathered when it
    is first read, and its gradient is reduce-scattered. TensorFlow then frees the full value after
    its last use, which may be in the backward pass.

    Args:
        name: String. Prefix of the collectives' names.
        keeps: Boolean. Whether to keep all full values, without units. Defaults to `False`.

    Attributes:
        unit: Integer. Index of the current unit, counted from 1. 0 before the first unit.
        input: Tensor. Input of the current unit, or `None`.
        previous_input: Tensor. Input of the unit before, or `None`.
        output_gradients: Dict from units to the gradient of the unit's output.
        scattered_gradients: Dict from units to the list of the weights' reduced gradients.
        units: Dict of traced units, see `units.run_block`.
        copies: Dict from names of tensors to variables, see `read_copy`.
    """

    def __init__(self, name: str, keeps: bool = False):
        self.name = name
        self.keeps = keeps
        self.unit = 0
        self.input = None
        self.previous_input = None
        self.output_gradients = {}
        self.scattered_gradients = {}
        self.units = {}
        self.copies = {}
        self._values = {}
        self._num_uses = {}

    def next_name(self, path: str) -> str:
        """Return a name for the next use of a variable, identical on all ranks."""
        self._num_uses[path] = self._num_uses.get(path, 0) + 1
        return f"{self.name}/{path}/{self._num_uses[path]}"

    def unshard_now(self, variables: Iterable[keras.Variable]) -> None:
        """All-gather variables in their storage dtype and keep the full values."""
        for variable in variables:
            if is_unsharded_for_use(variable):
                shard = tf.convert_to_tensor(variable.shards[0].value)
                name = self.next_name(variable.path)
                self._values[id(variable)] = all_gather(variable, shard, name)

    def unsharded(self, variable: keras.Variable) -> tf.Tensor:
        """Return the full value of a variable. Later calls return the same tensor."""
        if id(variable) in self._values:
            return _compat.autocast(variable, self._values[id(variable)])
        shard = local_shard(variable)
        key = id(variable), shard.dtype
        if key not in self._values:
            self._values[key] = self._gathered_with_gradient(variable, shard)
        return self._values[key]

    def start_unit(self, x: tf.Tensor) -> int:
        """Start the next unit with the input `x` and return its index."""
        self.previous_input = self.input
        self.input = x
        self.unit += 1
        return self.unit

    @property
    def forward_gate(self) -> list[tf.Tensor]:
        """Tensors that the current unit's all-gathers wait for in the forward pass."""
        return [] if self.previous_input is None else [self.previous_input]

    def _gathered_with_gradient(self, variable, shard):
        name = self.next_name(variable.path)
        gate = self.forward_gate
        if not variable.trainable:
            return tf.stop_gradient(all_gather(variable, shard, name, gate))

        @tf.custom_gradient
        def unshard(shard):
            value = all_gather(variable, shard, name, gate)
            dtype = shard.dtype
            return value, lambda dw: tf.cast(reduce_scatter(dw, f"{name}/gradient"), dtype)

        return unshard(shard)


def local_shard(variable: keras.Variable) -> tf.Tensor:
    """Return the local shard of a variable in the compute dtype of the current layer."""
    return _compat.autocast(variable, tf.convert_to_tensor(variable.shards[0].value))


def read_copy(variable: keras.Variable) -> tf.Tensor:
    """Return the value of a variable that another layer passes to a product.

    The product is a unit of the variable, so the value is not stored until the backward pass.
    """
    value = tf.convert_to_tensor(variable)
    if current_unsharding() is not None:
        current_unsharding().copies[value.name] = variable
    return value


def copied_variable(kernel: tf.Tensor | keras.Variable) -> tf.Tensor | keras.Variable:
    """Return the variable of a tensor from `read_copy`, possibly cast. Return others unchanged."""
    copies = getattr(current_unsharding(), "copies", None)
    source = kernel
    while copies and isinstance(source, tf.Tensor):
        if source.name in copies:
            return copies[source.name]
        source = source.op.inputs[0] if source.op.type == "Cast" else None
    return kernel


@contextlib.contextmanager
def unsharding(name: str, **options):
    """Unshard the weights that the `with` block reads; see `Unsharding` for the options."""
    computation = Unsharding(name, **options)
    with _unsharding.set(computation):
        yield computation


def inside_unit() -> contextlib.AbstractContextManager:
    """Return a context manager for the function of a unit, whose weights are full tensors."""
    return _unsharding.set(None)


def current_unsharding() -> Unsharding | None:
    """Return the `Unsharding` of the current computation, or `None`."""
    return _unsharding.get()


def full_trained_value(variable: keras.Variable) -> tf.Tensor:
    """Return the full tensor that gradients of a computation are taken of, in the storage dtype."""
    with _compat.without_autocast():
        is_sharded = is_unsharded_for_use(variable)
        return tf.convert_to_tensor(variable.value if is_sharded else trained_value(variable))
