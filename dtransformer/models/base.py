"""Base class of token models: embeddings, building, configs and parameter counts."""

import math

import keras
import tensorflow as tf

from dtransformer import _compat
from dtransformer.errors import check_int
from dtransformer.layers.arguments import (
    KeepsSettings,
    as_config,
    as_moe_config,
    checked,
    settings_of,
)
from dtransformer.layers.base import check_rate
from dtransformer.layers.dropout import Dropout
from dtransformer.layers.embedding import VocabEmbedding, VocabHead
from dtransformer.layers.norm import make_norm
from dtransformer.layers.position import PositionEmbedding
from dtransformer.models import weight_shapes
from dtransformer.models.input_keys import InputKeys
from dtransformer.parallel.config.config import MoEConfig
from dtransformer.parallel.mesh.axis_rules import constrain
from dtransformer.parallel.ops.training_noise import EmbeddingNoise
from dtransformer.parallel.pipeline_parallel.stage_weights import share_weights
from dtransformer.parallel.tracing.tensor_specs import static_or_dynamic_shape


def get_moe_config(arguments: dict) -> MoEConfig | None:
    """Return the `MoEConfig` in a network's arguments, or `None` with fewer than two experts."""
    value = arguments.get("moe_config")
    config = None if value is None else as_moe_config(value)
    return None if config is None or config.expert_num == 1 else config


def active_share(path: str, shape: tuple[int, ...], arguments: dict) -> float:
    """Return the fraction of a weight's elements that one token uses.

    The fraction is `num_experts_chosen / expert_num` for kernels and biases of routed
    experts, and 1 for every other weight, including routers and shared experts.

    Args:
        path: Path of the weight, without the network's name.
        shape: Shape of the weight. Experts are the first dimension.
        arguments: Arguments of the network.
    """
    config = get_moe_config(arguments)
    expert_rank = {"kernel": 3, "bias": 2}
    has_expert_weights = config is not None and "/feed_forward/" in path
    rank = expert_rank.get(path.split("_")[-1])
    if (
        not has_expert_weights
        or "/router/" in path
        or "/shared_experts/" in path
        or len(shape) != rank
    ):
        return 1.0
    return config.num_experts_chosen / config.expert_num


# Block arguments that networks accept under the same names.
_BLOCK_ARGUMENTS = (
    *("hidden_size", "num_heads", "ffn_hidden_size"),
    *("norm", "norm_epsilon", "gated", "use_bias", "num_kv_heads", "head_dim", "qkv_bias"),
    *("rotary_base", "rotary_fraction", "rotary_scaling", "query_scale", "soft_cap", "qk_norm"),
    *("qk_norm_epsilon", "window", "implementation", "moe_config", "moe_every", "norm_placement"),
    *("residual_scale", "block_pattern", "sinks", "latent", "qk_norm_after_rotary"),
)

# Sizes must be integers of at least 1. Dropout rates must be numbers in [0, 1).
_SIZES = (
    *("vocab_size", "source_vocab_size", "target_vocab_size"),
    *("hidden_size", "num_layers", "decoder_layers"),
)
_RATES = "dropout_rate", "attention_dropout_rate", "embedding_dropout_rate"


class TokenModel(KeepsSettings, keras.Model):
    """Base class of networks whose inputs are token ids.

    Attributes:
        arguments: Dict of the constructor's arguments. `from_config` creates an equal
            network from them.
        vocab_size: Number of vocabulary entries in the logits.
        input_keys: `InputKeys` with the names of the inputs.
        origin: Tuple of the model family and the folder of the published weights that the
            network started from, or `None`. Saved in configs.
        stored_dtypes: Dict from weight paths to the data types of the published tensors.
            Saving the network uses these types by default.
        generation_rules: Dict of the generation settings that came with published weights;
            see `parse_rules`. Saved in configs.
        embedding_noise: `EmbeddingNoise` added to embeddings in training, or `None`.
    """

    origin: tuple[str, str] | None = None
    stored_dtypes: dict = {}
    generation_rules: dict = {}
    has_warned_rules = False
    embedding_noise: EmbeddingNoise | None = None
    input_keys: InputKeys

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            cls.__init__ = checked(cls.__init__)
        if "call" in vars(cls):
            cls.call = _compat.told_as_it_is(cls.call)

    @_compat.told_as_it_is
    def __call__(self, inputs, *args, **kwargs):
        # Keras' error for unknown inputs is ten lines long: check the names first.
        self.named_inputs(inputs)
        return super().__call__(inputs, *args, **kwargs)

    def named_inputs(self, inputs) -> dict:
        """Return `call`'s inputs, or their shapes, as a dict with the names in `input_keys`.

        Raises:
            ValueError: If a name is unknown, or a required input is missing.
        """
        return self.input_keys.named(inputs, type(self).__name__)

    @property
    def embedding_scale(self) -> float:
        """Factor on embeddings. Defaults to √h (Vaswani et al., 2017, §3.4)."""
        scale = self.arguments.get("embedding_scale")
        return first_given(scale, float(self.arguments["hidden_size"]) ** 0.5)

    def check_positions(self, length: int, name: str = "max_length") -> None:
        """Check that a sequence fits into the learned positions.

        Args:
            length: Integer. Number of positions.
            name: Name of the argument that limits learned positions.

        Raises:
            ValueError: If positions are learned and `length` exceeds the limit.
        """
        limit = self.arguments[name]
        if self.arguments["positions"] == "learned" and length > limit:
            raise ValueError(
                f"{length} positions exceed the learned positions, `{name}={limit}`. Shorten the "
                "sequence, or create the network with more positions."
            )

    def logits_vocab_size(self) -> int:
        """Return the vocabulary size V of logits [..., V']. Entries from V on are padding."""
        return self.vocab_size

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return a dict from weight paths to shapes, without creating any weight.

        The shapes are the same in every layout: vocabularies have no padding.
        """
        return weight_shapes.of_network(type(self), self.arguments)

    def num_parameters(self) -> int:
        """Return the number of elements in all weights, without creating any weight.

        Example:

        >>> from dtransformer.models import CausalLM
        >>> CausalLM(50257, hidden_size=768, num_heads=12, num_layers=12).num_parameters()
        124439808
        """
        return sum(math.prod(shape) for shape in self.weight_shapes().values())

    def num_active_parameters(self) -> int:
        """Return the number of parameters that one token uses, with its chosen experts only.

        Example:

        >>> import dtransformer
        >>> from dtransformer.models import CausalLM
        >>> moe = dtransformer.MoEConfig(expert_num=8, num_experts_chosen=2)
        >>> model = CausalLM(100, hidden_size=16, num_heads=2, num_layers=2, moe_config=moe)
        >>> model.num_parameters(), model.num_active_parameters()
        (54624, 29088)
        """
        return sum(
            round(math.prod(shape) * active_share(path, shape, self.arguments))
            for path, shape in self.weight_shapes().items()
        )

    def _make_embedding(self, vocab_size, name):
        h = self.arguments["hidden_size"]
        # Embeddings then have unit variance after scaling by √h, and a tied head has logits of a
        # sensible size.
        deviation = 1.0 if self.arguments.get("scales_output") else h**-0.5
        normal = keras.initializers.RandomNormal(stddev=deviation)
        return VocabEmbedding(vocab_size, h, normal, dtype=self.dtype_policy, name=name)

    def _make_head(self):
        return VocabHead(
            self.vocab_size,
            use_bias=self.arguments["head_bias"],
            tied=self.arguments["tied_head"],
            keeps_padding=True,
            scale=self.arguments.get("logits_scale", 1.0),
            soft_cap=self.arguments.get("logits_soft_cap"),
            dtype=self.dtype_policy,
            name="head",
        )

    def _make_positions(self, length, name):
        offset = self.arguments.get("position_offset", 0)
        options = {"offset": offset, "dtype": self.dtype_policy, "name": name}
        return PositionEmbedding(length, self.arguments["positions"], **options)

    def _make_embedding_norm(self, name):
        kind = self.arguments["norm"]
        epsilon = self.arguments["norm_epsilon"]
        norm = make_norm(kind, epsilon, dtype=self.dtype_policy, name=name)
        norm.pipeline_stage = 0
        return norm

    def _make_embedding_dropout(self, name):
        rate = self.arguments["embedding_dropout_rate"]
        return Dropout(rate, dtype=self.dtype_policy, name=name)

    def _block_arguments(self, lambda_func):
        """Return the arguments of a stack of blocks, except the number of blocks."""
        is_rotary = self.arguments["positions"] == "rotary"
        return {
            "lambda_func": lambda_func,
            "attention_dropout_rate": self.arguments["attention_dropout_rate"],
            "hidden_dropout_rate": self.arguments["dropout_rate"],
            "hidden_act": self.arguments["hidden_act"],
            "post_layernorm_residual": self.arguments["post_layernorm_residual"],
            "dtype": self.dtype_policy,
            **{key: self.arguments[key] for key in _BLOCK_ARGUMENTS if key in self.arguments},
            **({} if is_rotary else {"rotary_base": None}),
        }

    def _embed_ids(
        self, ids, embedding, positions, dropout, start=0, segments=None, norm=None, training=False
    ):
        """Return the first block's input [b, s, h] for ids [b, s], and the table [V', h]."""
        x, table = embedding(ids)
        if self.embedding_noise is not None:
            x = self.embedding_noise(x)
        if not self.arguments.get("trains_padding", True):
            is_trained = constrain((ids != self.pad_id)[..., None], ("batch", "length", None))
            x = tf.where(is_trained, x, tf.stop_gradient(x))
        if self.embedding_scale != 1:
            x *= tf.cast(self.embedding_scale, x.dtype)
        if positions is not None:
            x = positions(x, start=start, segments=segments)
        if norm is not None:
            x = norm(x)
        return dropout(x, training=training), table

    def _build_layers(self, embeddings, layers, example_inputs):
        """Build the embeddings on [b, s] and the other layers on [b, s, h].

        `example_inputs` is a nested structure of tensor specs.
        """
        with keras.name_scope(self.name, caller=self):
            for embedding in embeddings:
                # Source and target may share an embedding.
                if not embedding.built:
                    embedding.build((None, None))
            for layer in filter(None, layers):
                layer.build((None, None, self.arguments["hidden_size"]))
        self.built = True
        share_weights(self, example_inputs)

    def get_config(self):
        config = {"name": self.name, "dtype": keras.dtype_policies.serialize(self.dtype_policy)}
        return {**config, **as_config(self.arguments), **settings_of(self)}


_LAST = 2**30  # larger than every position


def start_after_padding(ids: tf.Tensor, pad_id: int) -> tf.Tensor:
    """Return the start position of each row that gives its first token position 0.

    Args:
        ids: Int tensor [b, s]. Padding may precede the tokens.
        pad_id: Id of the padding token.

    Returns:
        Int32 tensor [b]: minus the number of leading padding tokens.
    """
    length = static_or_dynamic_shape(ids)[1]
    positions = tf.where(ids != pad_id, tf.range(length), _LAST)
    return -tf.minimum(tf.reduce_min(positions, axis=1), length)


def complete_arguments(arguments: dict) -> dict:
    """Check a network's arguments and fill in defaults that depend on other arguments.

    Dropout rates that are `None` become `dropout_rate`, and an `ffn_hidden_size` of `None`
    becomes 4·h. A `lambda_func` of `None` is removed.

    Returns:
        A new dict of the arguments.

    Raises:
        TypeError: If a size is not an integer, or a rate is not a number.
        ValueError: If a size or a rate is out of range.
    """
    result = dict(arguments)
    for name in filter(result.__contains__, _SIZES):
        check_int(name, result[name])
    for name in _RATES:
        result[name] = check_rate(name, first_given(result[name], result["dropout_rate"]))
    result["ffn_hidden_size"] = first_given(result["ffn_hidden_size"], 4 * result["hidden_size"])
    if result["lambda_func"] is None:
        del result["lambda_func"]
    return result


def first_given(value, default):
    """Return `value`, or `default` if `value` is `None`."""
    return default if value is None else value


def check_ids(vocab_size: int, **ids: int | None) -> None:
    """Check that special tokens are in the vocabulary. Ids of `None` pass.

    Raises:
        ValueError: If an id is negative, or `vocab_size` or larger.
    """
    for name, value in ids.items():
        if value is not None and not 0 <= value < vocab_size:
            raise ValueError(
                f"`{name}` must be in the vocabulary of {vocab_size} entries, got {value}."
            )
