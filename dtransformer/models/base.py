"""Base of networks of tokens: embeddings, building, the config, and which weights are active."""

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


def experts_of(arguments: dict) -> MoEConfig | None:
    """Return the `MoEConfig` of a network's arguments; None where there is one expert alone."""
    given = arguments.get("moe_config")
    config = None if given is None else as_moe_config(given)
    return None if config is None or config.expert_num == 1 else config


def active_share(path: str, shape: tuple[int, ...], arguments: dict) -> float:
    """Return which share of a weight's elements a token is computed with.

    Args:
        path: the weight's.
        shape: its shape; experts are its first dimension.
        arguments: the network's.
    """
    config, of_expert = experts_of(arguments), {"kernel": 3, "bias": 2}
    is_one = config is not None and "/feed_forward/" in path
    rank = of_expert.get(path.split("_")[-1])
    if not is_one or "/router/" in path or "/shared_experts/" in path or len(shape) != rank:
        return 1.0
    return config.num_experts_chosen / config.expert_num


# Of the blocks' arguments those that networks take by the same names.
_BLOCK_ARGUMENTS = (
    *("hidden_size", "num_heads", "ffn_hidden_size"),
    *("norm", "norm_epsilon", "gated", "use_bias", "num_kv_heads", "head_dim", "qkv_bias"),
    *("rotary_base", "rotary_fraction", "rotary_scaling", "query_scale", "soft_cap", "qk_norm"),
    *("qk_norm_epsilon", "window", "implementation", "moe_config", "moe_every", "norm_placement"),
    *("residual_scale", "block_pattern", "sinks", "latent", "qk_norm_after_rotary"),
)

# Arguments of networks that are sizes of at least 1, and those that are rates of dropout.
_SIZES = (
    *("vocab_size", "source_vocab_size", "target_vocab_size"),
    *("hidden_size", "num_layers", "decoder_layers"),
)
_RATES = "dropout_rate", "attention_dropout_rate", "embedding_dropout_rate"


class TokenModel(KeepsSettings, keras.Model):
    """A network whose inputs are the ids of tokens.

    Attributes:
        arguments: dict of the arguments from which `from_config` makes the network again.
        vocab_size: number of entries of the vocabulary of the logits.
        input_keys: the names of the inputs; see `InputKeys`.
        origin: the family and the folder of the published weights that it has, or had before it
            was trained; None where there are none. Configs keep it.
        stored_dtypes: Types of the published tensors by the weights' paths. A saved network has the same
            types by default.
        generation_rules: what published weights say of generation; see `rules_of`. Configs keep it.
        embedding_noise: what is added to embeddings while a trainer trains; None for nothing.
    """

    origin: tuple[str, str] | None = None
    stored_dtypes: dict = {}
    generation_rules: dict = {}
    has_told_rules = False
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
        self.named_inputs(inputs)  # before Keras, which makes ten lines of an error
        return super().__call__(inputs, *args, **kwargs)

    def named_inputs(self, inputs) -> dict:
        """Return a dict of `call`'s inputs, or of their shapes, by the names of `input_keys`.

        Raises:
            ValueError: there is a name that is not known, or one lacks.
        """
        return self.input_keys.named(inputs, type(self).__name__)

    @property
    def embedding_scale(self) -> float:
        """What embeddings are multiplied with; by default √h (Vaswani et al., 2017, §3.4)."""
        scale = self.arguments.get("embedding_scale")
        return first_given(scale, float(self.arguments["hidden_size"]) ** 0.5)

    def check_positions(self, length: int, name: str = "max_length") -> None:
        """Check that there are so many positions.

        Args:
            length: number of positions.
            name: the argument that has the number of the learned ones.

        Raises:
            ValueError: there are fewer learned ones.
        """
        limit = self.arguments[name]
        if self.arguments["positions"] == "learned" and length > limit:
            raise ValueError(
                f"{length} positions are asked for, but the learned positions end at {name}={limit}"
            )

    def logits_vocab_size(self) -> int:
        """Return the number V of entries that logits [..., V'] are of; those after it are padding."""
        return self.vocab_size

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all weights by their paths, before any is made.

        They are those of every layout: a vocabulary's without its padding.
        """
        return weight_shapes.of_network(type(self), self.arguments)

    def num_parameters(self) -> int:
        """Return the number of elements of all weights, before any is made.

        Example:

        >>> from dtransformer.models import CausalLM
        >>> CausalLM(50257, hidden_size=768, num_heads=12, num_layers=12).num_parameters()
        124439808
        """
        return sum(math.prod(shape) for shape in self.weight_shapes().values())

    def num_active_parameters(self) -> int:
        """Return the number of elements that a token is computed with: of experts a few.

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
        # Unit variance after the multiplication with √h, and a sensible tied head.
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
        """Return the embedding of positions up to a length, of the kind of the arguments."""
        offset = self.arguments.get("position_offset", 0)
        own = {"offset": offset, "dtype": self.dtype_policy, "name": name}
        return PositionEmbedding(length, self.arguments["positions"], **own)

    def _make_embedding_norm(self, name):
        kind, epsilon = self.arguments["norm"], self.arguments["norm_epsilon"]
        norm = make_norm(kind, epsilon, dtype=self.dtype_policy, name=name)
        norm.pipeline_stage = 0
        return norm

    def _make_embedding_dropout(self, name):
        rate = self.arguments["embedding_dropout_rate"]
        return Dropout(rate, dtype=self.dtype_policy, name=name)

    def _block_arguments(self, lambda_func):
        """Return the arguments of a stack of blocks that the network's say, but for their number."""
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
        """Return the first block's input [b, s, h] of ids [b, s], and the table [V', h]."""
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

    def _build_layers(self, embeddings, others, example_inputs):
        """Build what takes ids, then what takes [b, s, h]; inputs are nested specs."""
        with keras.name_scope(self.name, caller=self):
            for embedding in embeddings:
                if not embedding.built:  # source and target may share one
                    embedding.build((None, None))
            for layer in filter(None, others):
                layer.build((None, None, self.arguments["hidden_size"]))
        self.built = True
        share_weights(self, example_inputs)

    def get_config(self):
        config = {"name": self.name, "dtype": keras.dtype_policies.serialize(self.dtype_policy)}
        return {**config, **as_config(self.arguments), **settings_of(self)}


_LAST = 2**30  # a place after all others


def start_after_padding(ids: tf.Tensor, pad_id: int) -> tf.Tensor:
    """Return the position of each row's first id, so that its first token's is 0: int32 [b].

    Args:
        ids: int tensor [b, s]; padding may come before the tokens.
        pad_id: id of the padding.
    """
    length = static_or_dynamic_shape(ids)[1]
    places = tf.where(ids != pad_id, tf.range(length), _LAST)
    return -tf.minimum(tf.reduce_min(places, axis=1), length)


def completed(arguments: dict) -> dict:
    """Return a network's arguments, checked, with the defaults that depend on other arguments.

    Other dropouts are `dropout_rate`, and `ffn_hidden_size` is 4·h, where they are None. A
    `lambda_func` of None is left out.

    Raises:
        TypeError: a size is not an int, or a rate is not a number.
        ValueError: a size or a rate is out of range.
    """
    found = dict(arguments)
    for name in filter(found.__contains__, _SIZES):
        check_int(name, found[name])
    for name in _RATES:
        found[name] = check_rate(name, first_given(found[name], found["dropout_rate"]))
    found["ffn_hidden_size"] = first_given(found["ffn_hidden_size"], 4 * found["hidden_size"])
    if found["lambda_func"] is None:
        del found["lambda_func"]
    return found


def first_given(value, default):
    """Return `value`, or `default` where it is None."""
    return default if value is None else value


def check_ids(vocab_size: int, **ids: int | None) -> None:
    """Check that special tokens are entries of the vocabulary.

    Raises:
        ValueError: names the one that is not.
    """
    for name, value in ids.items():
        if value is not None and not 0 <= value < vocab_size:
            raise ValueError(f"{name} must be in the vocabulary of {vocab_size}, got {value}")
