"""The head that BERT is trained with: of masked tokens."""

from collections.abc import Callable

import tensorflow as tf

from dtransformer.layers.activations import get_activation
from dtransformer.layers.arguments import given_arguments
from dtransformer.layers.base import Layer, check_size, register
from dtransformer.layers.embedding import VocabHead
from dtransformer.layers.linear import Linear
from dtransformer.layers.norm import make_norm


@register
class MaskedLMHead(Layer):
    """A dense layer, an activation and a norm, then a logit for every vocabulary entry.

    Reference: Devlin et al., 2019, "BERT", arXiv 1810.04805, as published in its code.

    Args:
        vocab_size: number V of entries.
        hidden_size: size h of the inputs.
        hidden_act: a Keras activation's name, or a callable.
        norm_epsilon: what the norm adds to the variance.
        norm: the norm's name; see `make_norm`.
        dense_bias: whether the dense layer has a bias.
        use_bias, tied: as `VocabHead`'s.

    Call arguments:
        inputs: tensor [b, s, h].
        table: tensor [V', h], where tied.

    Output shape:
        [b, s, V'], V padded to a multiple of model_parallel; see `VocabHead`.
    """

    pipeline_stage = -1

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        hidden_act: str | Callable = "gelu",
        norm_epsilon: float = 1e-5,
        use_bias: bool = True,
        tied: bool = True,
        norm: str = "layer_norm",
        dense_bias: bool = True,
        **kwargs,
    ):
        given = given_arguments(locals())
        super().__init__(**kwargs)
        self.supports_masking = True
        check_size("hidden_size", hidden_size)
        self.arguments = given
        self.takes(hidden_size)
        self.activation = get_activation(hidden_act)
        self.dense = Linear(
            hidden_size, dense_bias, parallel=None, dtype=self.dtype_policy, name="dense"
        )
        self.norm = make_norm(norm, norm_epsilon, dtype=self.dtype_policy, name="norm")
        self.logits = VocabHead(
            vocab_size,
            use_bias=use_bias,
            tied=tied,
            keeps_padding=True,
            dtype=self.dtype_policy,
            name="logits",
        )

    def build(self, inputs_shape: tuple, table_shape: tuple | None = None) -> None:
        for layer in (self.dense, self.norm, self.logits):
            layer.build(inputs_shape)

    def __call__(self, inputs, table=None, **kwargs):
        # As of `VocabHead`: where it is not tied it depends on no table.
        return super().__call__(inputs, *([table] if self.arguments["tied"] else []), **kwargs)

    def call(self, inputs: tf.Tensor, table: tf.Tensor | None = None) -> tf.Tensor:
        return self.logits(self.norm(self.activation(self.dense(inputs))), table)

    def compute_output_shape(self, inputs_shape: tuple, table_shape: tuple | None = None) -> tuple:
        return self.logits.compute_output_shape(inputs_shape, table_shape)
