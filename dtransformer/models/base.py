"""Base class of token models: embeddings, building, configs and parameter counts."""

import math
from collections.abc import Callable
from typing import ClassVar

import keras
import tensorflow as tf

from dtransformer import _compat
from dtransformer.layers.arguments import (
    SettingsMixin,
    as_moe_config,
    get_settings,
    serialize_arguments,
    validate_arguments,
)
from dtransformer.layers.dropout import Dropout
from dtransformer.layers.embedding import VocabEmbedding, VocabHead
from dtransformer.layers.norm import make_norm
from dtransformer.layers.position import PositionEmbedding
from dtransformer.models import weight_shapes
from dtransformer.models.input_keys import InputKeys
from dtransformer.parallel.config.config import MoEConfig
from dtransformer.parallel.mesh.axis_rules import constrain
from dtransformer.parallel.mesh.training_noise import EmbeddingNoise
from dtransformer.parallel.pipeline_parallel.stage_weights import share_weights
from dtransformer.parallel.tracing.tensor_specs import static_or_dynamic_shape
from dtransformer.transformer_config import TransformerConfig
from dtransformer.transformer_config import check_ids as check_ids


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


class TokenModel(SettingsMixin, keras.Model):
    """Base class of networks whose inputs are token ids.

    Args:
        config: `TransformerConfig`, or an integer: the size of the vocabulary.
        lambda_func: Callable that assigns blocks to pipeline stages. Defaults to `spread_evenly`.
        name: String. First part of all weight paths. Defaults to `default_name`.
        dtype: Dtype policy or its name. Defaults to Keras' policy.
        trainable: Boolean. Whether the weights are trained.
        **arguments: Fields of the config and its groups, instead of a `config`; see
            `TransformerConfig.from_arguments`.

    Attributes:
        network_class: Name of the class in `TransformerConfig.network`.
        config: `TransformerConfig` of the network.
        arguments: Dict of the fields of the config that the network has, and `lambda_func`.
            `from_config` creates an equal network from them.
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

    network_class: ClassVar[str]
    default_name: ClassVar[str]
    vocab_argument: ClassVar[str] = "vocab_size"
    origin: tuple[str, str] | None = None
    stored_dtypes: dict = {}
    generation_rules: dict = {}
    has_warned_rules = False
    embedding_noise: EmbeddingNoise | None = None
    input_keys: InputKeys

    def __init__(
        self,
        config: TransformerConfig | int | None = None,
        *,
        lambda_func: Callable | None = None,
        name: str | None = None,
        dtype: str | dict | keras.DTypePolicy | None = None,
        trainable: bool = True,
        **arguments,
    ):
        super().__init__(name=name or self.default_name, dtype=dtype, trainable=trainable)
        self.config = self._make_config(config, arguments)
        self.arguments = self.config.arguments()
        if lambda_func is not None:
            self.arguments["lambda_func"] = lambda_func
        self.vocab_size = self.config.vocab_size
        self.pad_id = self.config.pad_id

    @classmethod
    def _make_config(cls, config, arguments):
        """Return a config as it is, or the config for a vocabulary size and flat arguments."""
        if not isinstance(config, TransformerConfig):
            sizes = {} if config is None else {cls.vocab_argument: config}
            return TransformerConfig.from_arguments(cls.network_class, **sizes, **arguments)
        if arguments:
            raise TypeError(
                f"{cls.__name__} got a TransformerConfig and `{next(iter(arguments))}`. Set the "
                "field in the config, or pass all fields as arguments."
            )
        if config.network != cls.network_class:
            raise ValueError(
                f"{cls.__name__} got a config with `network={config.network!r}`. Set "
                f"`network={cls.network_class!r}`."
            )
        return config

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            cls.__init__ = validate_arguments(cls.__init__)
        if "call" in vars(cls):
            cls.call = _compat.keep_error_messages(cls.call)

    @_compat.keep_error_messages
    def __call__(self, inputs, *args, **kwargs):
        # Keras' error for unknown inputs is ten lines long: check the names first.
        self.named_inputs(inputs)
        return super().__call__(inputs, *args, **kwargs)

    def named_inputs(self, inputs) -> dict:
        """Return `call`'s inputs, or their shapes, as a dict with the names in `input_keys`.

        Raises:
            ValueError: If a name is unknown, or a required input is missing.
        """
        return self.input_keys.to_dict(inputs, type(self).__name__)

    @property
    def embedding_scale(self) -> float:
        """Factor on embeddings. Defaults to √h (Vaswani et al., 2017, §3.4)."""
        scale = self.config.embedding.embedding_scale
        return value_or_default(scale, float(self.config.hidden_size) ** 0.5)

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
        return weight_shapes.network_shapes(type(self), self.arguments)

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
        h = self.config.hidden_size
        # Embeddings then have unit variance after scaling by √h, and a tied head has logits of a
        # sensible size.
        deviation = 1.0 if self.config.head.scales_output else h**-0.5
        normal = keras.initializers.RandomNormal(stddev=deviation)
        return VocabEmbedding(vocab_size, h, normal, dtype=self.dtype_policy, name=name)

    def _make_head(self):
        options = self.config.head
        return VocabHead(
            self.vocab_size,
            use_bias=options.head_bias,
            tied=options.tied_head,
            keeps_padding=True,
            scale=options.logits_scale,
            soft_cap=options.logits_soft_cap,
            dtype=self.dtype_policy,
            name="head",
        )

    def _make_positions(self, length, name):
        options = self.config.embedding
        return PositionEmbedding(
            length,
            options.positions,
            offset=options.position_offset,
            dtype=self.dtype_policy,
            name=name,
        )

    def _make_embedding_norm(self, name):
        options = self.config.block
        norm = make_norm(options.norm, options.norm_epsilon, dtype=self.dtype_policy, name=name)
        norm.pipeline_stage = 0
        return norm

    def _make_embedding_dropout(self, name):
        rate = self.config.embedding_dropout_rate
        return Dropout(rate, dtype=self.dtype_policy, name=name)

    def _block_arguments(self):
        """Return the arguments of a stack of blocks, except the number of blocks."""
        config = self.config
        options = {**vars(config.attention), **vars(config.block)}
        if config.embedding.positions != "rotary":
            options["rotary_base"] = None
        has_field = {"rotary_base", *self.arguments}
        return {
            **{name: value for name, value in options.items() if name in has_field},
            "hidden_size": config.hidden_size,
            "num_heads": config.num_heads,
            "ffn_hidden_size": config.ffn_hidden_size,
            "attention_dropout_rate": config.attention_dropout_rate,
            "hidden_dropout_rate": config.dropout_rate,
            "lambda_func": self.arguments.get("lambda_func"),
            "dtype": self.dtype_policy,
        }

    def _embed_ids(
        self, ids, embedding, positions, dropout, start=0, segments=None, norm=None, training=False
    ):
        """Return the first block's input [b, s, h] for ids [b, s], and the table [V', h]."""
        x, table = embedding(ids)
        if self.embedding_noise is not None:
            x = self.embedding_noise(x)
        if not self.config.embedding.trains_padding:
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
                layer.build((None, None, self.config.hidden_size))
        self.built = True
        share_weights(self, example_inputs)

    def get_config(self):
        config = {"name": self.name, "dtype": keras.dtype_policies.serialize(self.dtype_policy)}
        return {**config, **serialize_arguments(self.arguments), **get_settings(self)}


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


def value_or_default(value, default):
    """Return `value`, or `default` if `value` is `None`."""
    return default if value is None else value
