"""Training objective: the losses of a network's outputs over the global batch."""

import keras
import tensorflow as tf

from dtransformer import _compat
from dtransformer.layers.loss import CrossEntropyLoss, class_numbers, hits
from dtransformer.parallel.tracing import trace
from dtransformer.trainers.loss_terms import Counted, check_loss, check_range, share_of

_BY_SHAPE = "crossentropy", "ce"  # Keras chooses these losses by an output's shape.
_COUNTS = len(Counted._fields)  # Number of counts per output.


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
        self._losses, self._weights, self._names = loss, loss_weights, output_names
        self.losses = [one for one in keras.tree.flatten(loss) if one is not None]
        for one in self.losses:
            if not hasattr(one, "per_token") and one not in _BY_SHAPE:
                check_loss(keras.losses.get(one))

    @property
    def is_of_tokens(self) -> bool:
        """True if the only loss is a token loss. Epoch means are then weighted by tokens."""
        return len(self.losses) == 1 and hasattr(self.losses[0], "token_weights")

    @property
    def weights_epoch_means(self) -> bool:
        """True if epoch means weight batches by their tokens or sample weights, not by their rows.

        This holds for a loss of tokens, and for a loss with the attribute `weights_epoch_means`.
        Other losses weight batches by rows, as Keras does, and rows of padding count.
        """
        is_marked = any(hasattr(loss, "weights_epoch_means") for loss in self.losses)
        return self.is_of_tokens or is_marked

    @property
    def knows_divisors(self) -> bool:
        """True if all loss normalizers are known before the forward pass."""
        return all(
            not hasattr(one, "per_token") or hasattr(one, "token_weights") for one in self.losses
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
        has_ids = self.is_of_tokens or "sparse_categorical_crossentropy" in str(self.losses)
        if has_ids and len(shape) > 1 and shape[-1] != 1:
            raise ValueError(
                f"`class_weight` weights rows, but the labels of shape {tuple(shape)} are class "
                "ids of tokens. Pass `sample_weight` in the labels' shape instead, the weight of "
                "each label's class."
            )

    def counts(self, inputs, labels, sample_weight) -> tf.Tensor:
        """Return the local counts that are summed over ranks before the forward pass.

        Args:
            inputs, labels: Nested tensors [b, ...].
            sample_weight: Tensor or nested tensors [b, ...], or `None`.

        Returns:
            A float32 tensor [1 + 3·n]: the number of rows, and a `Counted` for each of the n label
            tensors.
        """
        rows = tf.shape(keras.tree.flatten(inputs)[0])[0]
        return tf.stack([tf.cast(rows, "float32"), *self._label_counts(labels, sample_weight)])

    def name_of(self, name: str) -> str:
        """Return a description of a loss for messages.

        Args:
            name: Key of the loss in the result of `sums`: `"loss"` or `"loss/NAME"`.
        """
        if name != "loss":
            return f"the loss of {name.removeprefix('loss/')}"
        loss = (self.losses or ["that layers add"])[0]
        return f"the loss {getattr(loss, 'name', None) or getattr(loss, '__name__', loss)}"

    @staticmethod
    def rows(counts) -> tf.Tensor:
        """Return the number of rows, from the result of `counts`."""
        return counts[0]

    @staticmethod
    def counted(counts, number: int) -> Counted:
        """Return the `Counted` of one label tensor, from the result of `counts`."""
        start = 1 + _COUNTS * number
        return Counted(*(counts[start + i] for i in range(_COUNTS)))

    def _label_counts(self, labels, sample_weight):
        if not self.losses:
            return []
        flat = [tf.convert_to_tensor(x) for x in keras.tree.flatten(labels)]
        weights, losses = _one_each(sample_weight, len(flat)), self._losses
        names = sorted(labels) if isinstance(labels, dict) else self._names
        if isinstance(losses, dict) and names:
            losses = [losses.get(name) for name in names]
        if isinstance(losses, (list, tuple)) and len(losses) != len(flat):
            # Keras pairs the remaining losses with the labels.
            losses = [loss for loss in losses if loss is not None]
        losses = _one_each(losses, len(flat))
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

    def sums(self, outputs, labels, sample_weight, counts, own_is_all: bool) -> dict:
        """Return the local sums of this part of a batch. They add up over ranks and micro-batches.

        Args:
            outputs, labels, sample_weight: Nested tensors [b, ...].
            counts: `counts` of the global batch, possibly with more elements.
            own_is_all: Whether these rows are the global batch.

        Returns:
            A dict of float32 scalars:

            - `"loss"`: local part of the loss. 0 if only layers add losses.
            - `"loss/NAME"`: local part of each loss, if there are several.
            - `"divided"`: present if the total loss must still be divided by its total.
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
        flat, shares, seen = keras.tree.flatten(labels), {}, []

        def term(loss, name):
            loss = loss.fn if hasattr(getattr(loss, "fn", None), "per_token") else loss

            def share(y_true, y_pred, weight=None):
                counted = self.counted(counts, _position(y_true, flat))
                shares[name] = share_of(loss, y_true, y_pred, weight, counted, own_is_all)
                seen[:] = y_pred, y_true
                return shares[name].loss

            return share

        compiled = _compat.CompileLoss(self._losses, self._weights, self._names, term)
        with tf.name_scope("loss"):
            sums = {"loss": tf.cast(compiled(labels, outputs, sample_weight), "float32")}
        if len(shares) > 1:
            sums.update({f"loss/{name}": share.loss for name, share in shares.items()})
            if any(share.divided is not None for share in shares.values()):
                raise ValueError(
                    "Several losses cannot be combined if one of them is averaged over a mask and "
                    "the batch is divided. Use sample weights with the reduction "
                    "'mean_with_sample_weight' instead of the mask, or one data shard with "
                    "`micro_batch_num=1`."
                )
            return {**sums, "counted": tf.cast(tf.shape(flat[0])[0], "float32")}
        (share,) = shares.values()
        if share.divided is not None:
            sums["divided"] = share.divided
        found = _accuracy(*seen, share.weights)
        # Keras shows an accuracy only if `metrics` contains one.
        if not self.is_of_tokens:
            found.pop("right", None)
        return {**sums, **found}


def _label_checks(labels, loss):
    """Return operations that fail if the labels of a token loss are not valid class ids."""
    if not labels.dtype.is_integer:
        raise ValueError(
            f"{type(loss).__name__} needs integer class ids, but the labels have the dtype "
            f"{labels.dtype.name}. Cast them to int32."
        )
    ignored, size = getattr(loss, "ignore_id", None), getattr(loss, "vocab_size", None)
    name = "labels" if ignored is None else f"labels other than ignore_id={ignored}"
    if ignored is not None:
        labels = tf.boolean_mask(labels, labels != ignored)
    return [check_range(labels, name, size)]


def _one_each(given, number):
    """Return a list with one element per label tensor; a single element is repeated."""
    each = keras.tree.flatten(given) if given is not None else [None]
    return each if len(each) == number else each[:1] * number


def _position(tensor, flat):
    return next(i for i, x in enumerate(flat) if x is tensor)


def _accuracy(outputs, labels, weights):
    """Return the accuracy's sums, `"right"` and `"counted"`. Only classifiers have `"right"`."""
    labels = class_numbers(labels, outputs)
    size = tf.cast(tf.size(labels), "float32")
    if weights is None:
        counted = {"counted": size}
        weights = tf.ones([])
    else:
        each = tf.math.divide_no_nan(size, tf.cast(tf.size(weights), "float32"))
        counted = {"counted": tf.reduce_sum(tf.cast(weights, "float32")) * each}
        extra = labels.shape.rank - weights.shape.rank
        weights = weights[(..., *[None] * extra)] if extra > 0 else weights
    with tf.name_scope("accuracy"):
        right = hits(outputs, labels)
    if right is None:
        return counted
    return {"right": tf.reduce_sum(right * tf.cast(weights, "float32")), **counted}


# Padded vocabularies: losses and outputs without the padding classes.


def of_classes(loss, network):
    """Exclude the padding classes of a network's logits from its token losses.

    Args:
        loss: As in `keras.Model.compile`.
        network: A `keras.Model`. The losses are returned unchanged if it has no
            `logits_vocab_size`.
    """
    return _of_sizes(loss, _sizes(network))


def _of_sizes(loss, sizes):
    if isinstance(loss, dict) and isinstance(sizes, dict):
        return {name: _of_sizes(one, sizes.get(name)) for name, one in loss.items()}
    if isinstance(loss, CrossEntropyLoss) and isinstance(sizes, int):
        return loss.of_classes(sizes)
    return loss


def without_padding(outputs, network):
    """Return a network's outputs without the padding classes of its logits."""
    sizes = _sizes(network)
    if sizes is None:
        return outputs
    return tf.nest.map_structure(lambda x, size: x[..., :size], outputs, sizes)


def _sizes(network):
    return network.logits_vocab_size() if hasattr(network, "logits_vocab_size") else None
