"""Training objective: the losses of a network's outputs over the global batch.

Each loss is computed in parts that sum to the loss of the global batch. Supports Keras losses with
any of their reductions, and token losses such as `CrossEntropyLoss`.
"""

import typing

import keras
import tensorflow as tf

from dtransformer import _compat
from dtransformer.layers.loss import correct_predictions, expand_to_rank, squeeze_labels
from dtransformer.parallel.tracing import trace
from dtransformer.trainers.loss_checks import check_loss

_BY_SHAPE = "crossentropy", "ce"  # Keras chooses these losses by an output's shape.


class LabelCounts(typing.NamedTuple):
    """Counts of an output's labels in the global batch, known before the forward pass.

    Args:
        size: Number of labels.
        weights: Sum of the sample weights. Negative without sample weights.
        tokens: Sum of the weights of weighted tokens. 0 if the loss is not a token loss.
    """

    size: tf.Tensor
    weights: tf.Tensor
    tokens: tf.Tensor


class LossTerm(typing.NamedTuple):
    """The local part of a loss.

    Args:
        loss: Local part of the loss: Σ values · weights / normalizer.
        normalizer_ratio: Local part of the true loss normalizer divided by the assumed one, if the
            true one is only known after the forward pass. Otherwise `None`.
        weights: Weight of each value, or `None` if all weights are 1.
        parts: Dict from names to local parts of terms of the loss, for the logs.
    """

    loss: tf.Tensor
    normalizer_ratio: tf.Tensor | None
    weights: tf.Tensor | None
    parts: dict[str, tf.Tensor]


class Objective:
    """Weighted sum of the losses of a network's outputs.

    Args:
        loss: As in `keras.Model.compile`: `None`, a Keras loss, its name, a function of
            `(y_true, y_pred)`, or dicts and lists of them, one per output. Also a
            `CrossEntropyLoss` or another object with the methods `per_token` and `token_weights`.
        loss_weights: Numbers in the same structure, or `None`.
        output_names: List of the names of the network's outputs, or `None` if they have no names.

    Attributes:
        losses: List of the losses as passed, without `None`.

    Raises:
        ValueError: If a loss cannot be computed in parts and summed, see `check_loss`.
    """

    def __init__(self, loss, loss_weights=None, output_names=None):
        self._losses = loss
        self._weights = loss_weights
        self._names = output_names
        self.losses = [leaf for leaf in keras.tree.flatten(loss) if leaf is not None]
        for leaf in self.losses:
            if not hasattr(leaf, "per_token") and leaf not in _BY_SHAPE:
                check_loss(keras.losses.get(leaf))

    @property
    def is_token_loss(self) -> bool:
        """True if the only loss is a token loss. Epoch means are then weighted by tokens."""
        return len(self.losses) == 1 and hasattr(self.losses[0], "token_weights")

    @property
    def weights_epoch_means(self) -> bool:
        """True if epoch means weight batches by their tokens or sample weights, not by their rows.

        This holds for a loss of tokens, and for a loss with the attribute `weights_epoch_means`.
        Other losses weight batches by rows, as Keras does, and rows of padding count.
        """
        is_marked = any(hasattr(loss, "weights_epoch_means") for loss in self.losses)
        return self.is_token_loss or is_marked

    @property
    def compares_rows(self) -> bool:
        """True if the loss of a row depends on other rows of the global batch.

        Losses with the attribute `compares_rows` have this property. Micro-batches then first
        compute the outputs of all rows.
        """
        return any(getattr(loss, "compares_rows", False) for loss in self.losses)

    @property
    def has_known_normalizers(self) -> bool:
        """True if all loss normalizers are known before the forward pass."""
        return all(
            not hasattr(loss, "per_token") or hasattr(loss, "token_weights") for loss in self.losses
        )

    def counts(self, inputs, labels, sample_weight) -> tf.Tensor:
        """Return the local counts that are summed over ranks before the forward pass.

        Args:
            inputs, labels: Nested tensors [b, ...].
            sample_weight: Tensor or nested tensors [b, ...], or `None`.

        Returns:
            A float32 tensor [1 + 3·n]: the number of rows, and a `LabelCounts` for each of the n
            label tensors.
        """
        rows = tf.shape(keras.tree.flatten(inputs)[0])[0]
        return tf.stack([tf.cast(rows, "float32"), *self._label_counts(labels, sample_weight)])

    @staticmethod
    def num_rows(counts) -> tf.Tensor:
        """Return the number of rows, from the result of `counts`."""
        return counts[0]

    @staticmethod
    def label_counts(counts, index: int) -> LabelCounts:
        """Return the `LabelCounts` of one label tensor, from the result of `counts`."""
        num_fields = len(LabelCounts._fields)
        start = 1 + num_fields * index
        return LabelCounts(*(counts[start + i] for i in range(num_fields)))

    def _label_counts(self, labels, sample_weight):
        if not self.losses:
            return []
        flat = [tf.convert_to_tensor(x) for x in keras.tree.flatten(labels)]
        weights = _one_per_label(sample_weight, len(flat))
        losses = self._losses
        names = sorted(labels) if isinstance(labels, dict) else self._names
        if isinstance(losses, dict) and names:
            losses = [losses.get(name) for name in names]
        if isinstance(losses, (list, tuple)) and len(losses) != len(flat):
            # Keras pairs the remaining losses with the labels.
            losses = [loss for loss in losses if loss is not None]
        losses = _one_per_label(losses, len(flat))
        counts = []
        for label, weight, loss in zip(flat, weights, losses):
            size = tf.cast(tf.size(label), "float32")
            total = -size if weight is None else tf.reduce_sum(tf.cast(weight, "float32"))
            tokens = tf.zeros([])
            if hasattr(loss, "token_weights"):
                with tf.control_dependencies(_label_checks(label, loss)):
                    tokens = tf.reduce_sum(loss.token_weights(label, weight))
            elif hasattr(loss, "per_token"):
                tokens = size  # The true sum is only known after the forward pass.
            counts += [size, total, tokens]
        return counts

    def sums(self, outputs, labels, sample_weight, counts, is_full_batch: bool) -> dict:
        """Return the local sums of this part of a batch. They add up over ranks and micro-batches.

        Args:
            outputs, labels, sample_weight: Nested tensors [b, ...].
            counts: `counts` of the global batch, possibly with more elements.
            is_full_batch: Whether these rows are the global batch.

        Returns:
            A dict of float32 scalars:

            - `"loss"`: local part of the loss. 0 if only layers add losses.
            - `"loss/NAME"`: local part of each loss, if there are several, or of each part of a
              token loss that has parts.
            - `"normalizer_ratio"`: present if the total loss must still be divided by its total.
            - `"counted"`: total weight of the labels, or the number of rows for several losses.
            - `"right"`: total weight of correctly predicted labels, for a token loss.

        Raises:
            ValueError: If there are several losses, and the normalizer of one is only known after
                the forward pass.
        """
        if not self.losses:
            return {"loss": tf.zeros([])}
        # `counts` checks the labels, which must happen first.
        if not trace.is_on_mesh():
            with tf.control_dependencies([counts]):
                labels = keras.tree.map_structure(tf.identity, labels)
        flat = keras.tree.flatten(labels)
        terms = {}
        accuracy_inputs = []

        def make_term(loss, name):
            loss = loss.fn if hasattr(getattr(loss, "fn", None), "per_token") else loss

            def term(y_true, y_pred, weight=None):
                label_counts = self.label_counts(counts, _position(y_true, flat))
                terms[name] = _loss_term(loss, y_true, y_pred, weight, label_counts, is_full_batch)
                accuracy_inputs[:] = y_pred, y_true
                return terms[name].loss

            return term

        compiled = _compat.CompileLoss(self._losses, self._weights, self._names, make_term)
        with tf.name_scope("loss"):
            sums = {"loss": tf.cast(compiled(labels, outputs, sample_weight), "float32")}
        if len(terms) > 1:
            sums.update({f"loss/{name}": term.loss for name, term in terms.items()})
            if any(term.normalizer_ratio is not None for term in terms.values()):
                raise ValueError(
                    "Several losses cannot be combined if one of them is averaged over a mask and "
                    "the batch is divided. Use sample weights with the reduction "
                    "'mean_with_sample_weight' instead of the mask, or one data shard with "
                    "`micro_batch_num=1`."
                )
            return {**sums, "counted": tf.cast(tf.shape(flat[0])[0], "float32")}
        (term,) = terms.values()
        sums |= {f"loss/{name}": part for name, part in term.parts.items()}
        if term.normalizer_ratio is not None:
            sums["normalizer_ratio"] = term.normalizer_ratio
        accuracy = _accuracy(*accuracy_inputs, term.weights)
        # Keras shows an accuracy only if `metrics` contains one.
        if not self.is_token_loss:
            accuracy.pop("right", None)
        return {**sums, **accuracy}


# Losses.


def _loss_term(loss, labels, outputs, sample_weight, label_counts, is_full_batch):
    """Return the local part of one output's loss.

    Args:
        loss: A `keras.losses.Loss`, or an object with `per_token(outputs, labels, weights)`.
        labels, outputs: Tensors [b, ...].
        sample_weight: Tensor [b, ...] or `None`.
        label_counts: `LabelCounts` of the labels in the global batch.
        is_full_batch: Whether these rows are the global batch.

    Raises:
        ValueError: If the loss returns one value for all rows and has sample weights or a mask.
    """
    parts = {}
    if hasattr(loss, "per_token"):
        mask = _compat.get_keras_mask(outputs)
        if mask is None and hasattr(loss, "weighted_sum"):
            values, weights = loss.weighted_sum(outputs, labels, sample_weight)
        else:
            values, weights = loss.per_token(outputs, labels, sample_weight)
            if mask is not None:
                weights = _apply_weights(weights, tf.cast(mask, weights.dtype))
            values *= tf.cast(weights, values.dtype)
        local_normalizer = tf.reduce_sum(tf.cast(weights, "float32"))
        normalizer = label_counts.tokens
        is_known = hasattr(loss, "token_weights") and mask is None
        parts = getattr(outputs, "loss_parts", {})
        parts = {name: part * tf.cast(weights, part.dtype) for name, part in parts.items()}
    else:
        values, weights, local_normalizer = _keras_values(
            loss, labels, outputs, sample_weight, is_full_batch
        )
        normalizer = _normalizer(loss.reduction, values, labels, label_counts)
        is_known = local_normalizer is None
        if not values.shape.rank:  # A single value, such as a mean.
            values = tf.math.multiply_no_nan(values, tf.cast(tf.size(labels), values.dtype))
    if not is_known and is_full_batch:
        normalizer = local_normalizer
        is_known = True

    def mean(x):
        return tf.math.divide_no_nan(tf.reduce_sum(tf.cast(x, "float32")), normalizer)

    ratio = None if is_known else tf.math.divide_no_nan(local_normalizer, normalizer)
    return LossTerm(mean(values), ratio, weights, {name: mean(x) for name, x in parts.items()})


def _keras_values(loss, labels, outputs, sample_weight, is_full_batch):
    """Return a Keras loss' weighted values, their weights, and the sum of the weights.

    The sum is `None` if it is known before the forward pass.
    """

    def cast(x):
        return tf.cast(x, loss.dtype)

    output_mask = _compat.get_keras_mask(outputs)
    values = loss.call(
        keras.tree.map_structure(cast, labels), keras.tree.map_structure(cast, outputs)
    )
    masks = [mask for mask in (output_mask, _compat.get_keras_mask(values)) if mask is not None]
    values = cast(values)
    weights = None
    normalizer = None
    if masks:
        mask = masks[0] if len(masks) == 1 else masks[0] & masks[1]
        weights = cast(mask)
        normalizer = tf.reduce_sum(tf.cast(mask, "float32"))
    if sample_weight is not None:
        sample_weight = cast(sample_weight)
        weights = sample_weight if weights is None else _apply_weights(weights, sample_weight)
        if normalizer is not None and loss.reduction == "mean_with_sample_weight":
            normalizer = tf.reduce_sum(tf.cast(weights, "float32"))
    if weights is not None:
        if not values.shape.rank and not is_full_batch:
            raise ValueError(
                f"The loss {loss.name!r} returns one value for all rows, so sample weights or a "
                "mask cannot be applied when ranks or micro-batches divide the rows. Return the "
                "loss of each row."
            )
        values = _apply_weights(values, weights)
    return values, weights, None if loss.reduction == "sum" else normalizer


def _normalizer(reduction, values, labels, label_counts):
    """Return the loss normalizer, as far as it is known before the forward pass."""
    if reduction == "sum":
        return tf.ones([])
    values_per_label = 1.0
    if values.shape.rank:
        size = tf.cast(tf.size(labels), "float32")
        values_per_label = tf.math.divide_no_nan(tf.cast(tf.size(values), "float32"), size)
    num_values = label_counts.size * values_per_label
    if reduction != "mean_with_sample_weight":
        return num_values
    return tf.where(label_counts.weights < 0, num_values, label_counts.weights)


def _apply_weights(values, weights):
    """Return values times weights, with Keras' rules for broadcasting.

    A last dimension of size 1 that only one of them has is removed. Weights of a lower rank apply
    to the first dimensions.
    """
    rank = values.shape.rank
    weight_rank = weights.shape.rank
    if weight_rank == rank + 1 and weights.shape[-1] == 1:
        weights = tf.squeeze(weights, -1)
    elif rank == weight_rank + 1 and values.shape[-1] == 1 and weight_rank > 1:
        values = tf.squeeze(values, -1)
    return values * expand_to_rank(weights, len(values.shape))


def _accuracy(outputs, labels, weights):
    """Return the accuracy's sums, `"right"` and `"counted"`. Only classifiers have `"right"`."""
    labels = squeeze_labels(labels, outputs)
    size = tf.cast(tf.size(labels), "float32")
    if weights is None:
        counted = {"counted": size}
        weights = tf.ones([])
    else:
        labels_per_weight = tf.math.divide_no_nan(size, tf.cast(tf.size(weights), "float32"))
        counted = {"counted": tf.reduce_sum(tf.cast(weights, "float32")) * labels_per_weight}
        weights = expand_to_rank(weights, labels.shape.rank)
    with tf.name_scope("accuracy"):
        right = correct_predictions(outputs, labels)
    if right is None:
        return counted
    return {"right": tf.reduce_sum(right * tf.cast(weights, "float32")), **counted}


# Labels.


def _one_per_label(nested, num_labels):
    """Return a list with one element per label tensor; a single element is repeated."""
    flat = keras.tree.flatten(nested) if nested is not None else [None]
    return flat if len(flat) == num_labels else flat[:1] * num_labels


def _position(tensor, flat):
    return next(i for i, x in enumerate(flat) if x is tensor)


def _label_checks(labels, loss):
    """Return operations that fail if the labels of a token loss are not valid class ids."""
    if not labels.dtype.is_integer:
        raise ValueError(
            f"{type(loss).__name__} needs integer class ids, but the labels have the dtype "
            f"{labels.dtype.name}. Cast them to int32."
        )
    ignored = getattr(loss, "ignore_id", None)
    size = getattr(loss, "vocab_size", None)
    name = "labels" if ignored is None else f"labels other than ignore_id={ignored}"
    if ignored is not None:
        labels = tf.boolean_mask(labels, labels != ignored)
    return [_check_range(labels, name, size)]


def _check_range(ids, name, size):
    """Return an operation that fails if an id is out of range.

    `convert_step_errors` converts the failure to a one-line `ValueError`.

    Args:
        ids: Integer tensor [...].
        name: String that names the ids in the error.
        size: Integer. Valid ids are from 0 to `size - 1`. `None` only excludes negative ids.
    """
    lowest = tf.reduce_min(ids)
    highest = tf.reduce_max(ids)
    is_inside = (lowest >= 0) | (tf.size(ids) == 0)
    expected = "0 or more"
    if size is not None:
        is_inside &= (highest < size) | (tf.size(ids) == 0)
        expected = f"0 to {size - 1}"
    line = f"dtransformer: The {name} must be {expected}. The batch has the range"
    return tf.debugging.Assert(is_inside, [line, lowest, highest])
