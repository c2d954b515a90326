"""Training objective: the losses of a network's outputs over the global batch."""

import keras
import tensorflow as tf

from dtransformer import _compat
from dtransformer.layers.loss import (
    CrossEntropyLoss,
    correct_predictions,
    expand_to_rank,
    squeeze_labels,
)
from dtransformer.parallel.tracing import trace
from dtransformer.trainers.loss_terms import LabelCounts, check_loss, check_range, loss_term

_BY_SHAPE = "crossentropy", "ce"  # Keras chooses these losses by an output's shape.
_COUNTS = len(LabelCounts._fields)  # Number of counts per output.


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

    def check_class_weight(self, labels) -> None:
        """Check that class weights are not combined with token labels.

        Keras would weight each row by the class of its largest label.

        Args:
            labels: Labels, or their spec.

        Raises:
            ValueError: If the labels are class ids [b, s] or [b, s, ...].
        """
        shape = getattr(labels, "shape", ())
        has_ids = self.is_token_loss or "sparse_categorical_crossentropy" in str(self.losses)
        if has_ids and len(shape) > 1 and shape[-1] != 1:
            raise ValueError(
                f"`class_weight` weights rows, but the labels of shape {tuple(shape)} are class "
                "ids of tokens. Pass `sample_weight` in the labels' shape instead, the weight of "
                "each label's class."
            )

    def sample_weight(self, labels, class_weight: dict | None, sample_weight=None):
        """Return the sample weights of a batch, from class weights if there are any.

        Raises:
            ValueError: If class weights are combined with token labels.
        """
        if class_weight is None:
            return sample_weight
        self.check_class_weight(labels)
        return _compat.class_weight_to_sample_weight(labels, class_weight, sample_weight)

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

    def describe_loss(self, name: str) -> str:
        """Return a description of a loss for messages.

        Args:
            name: Key of the loss in the result of `sums`: `"loss"` or `"loss/NAME"`.
        """
        if name != "loss":
            return f"the loss of {name.removeprefix('loss/')}"
        loss = (self.losses or ["that layers add"])[0]
        return f"the loss {getattr(loss, 'name', None) or getattr(loss, '__name__', loss)}"

    @staticmethod
    def num_rows(counts) -> tf.Tensor:
        """Return the number of rows, from the result of `counts`."""
        return counts[0]

    @staticmethod
    def label_counts(counts, index: int) -> LabelCounts:
        """Return the `LabelCounts` of one label tensor, from the result of `counts`."""
        start = 1 + _COUNTS * index
        return LabelCounts(*(counts[start + i] for i in range(_COUNTS)))

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
                terms[name] = loss_term(loss, y_true, y_pred, weight, label_counts, is_full_batch)
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
    return [check_range(labels, name, size)]


def _one_per_label(nested, num_labels):
    """Return a list with one element per label tensor; a single element is repeated."""
    flat = keras.tree.flatten(nested) if nested is not None else [None]
    return flat if len(flat) == num_labels else flat[:1] * num_labels


def _position(tensor, flat):
    return next(i for i, x in enumerate(flat) if x is tensor)


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


# Padded vocabularies: losses and outputs without the padding classes.


def exclude_padding_classes(loss, network):
    """Exclude the padding classes of a network's logits from its token losses.

    Args:
        loss: As in `keras.Model.compile`.
        network: A `keras.Model`. The losses are returned unchanged if it has no
            `logits_vocab_size`.
    """
    return _exclude_padding(loss, _vocab_sizes(network))


def _exclude_padding(loss, sizes):
    if isinstance(loss, dict) and isinstance(sizes, dict):
        return {
            name: _exclude_padding(output_loss, sizes.get(name))
            for name, output_loss in loss.items()
        }
    if isinstance(loss, CrossEntropyLoss) and isinstance(sizes, int):
        return loss.with_vocab_size(sizes)
    return loss


def without_padding(outputs, network):
    """Return a network's outputs without the padding classes of its logits."""
    sizes = _vocab_sizes(network)
    if sizes is None:
        return outputs
    return tf.nest.map_structure(lambda x, size: x[..., :size], outputs, sizes)


def _vocab_sizes(network):
    return network.logits_vocab_size() if hasattr(network, "logits_vocab_size") else None
