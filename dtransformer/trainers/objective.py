"""Objective: the losses of a network's outputs, over the global batch."""

import keras
import tensorflow as tf

from dtransformer import _compat
from dtransformer.layers.loss import CrossEntropyLoss, class_numbers, hits
from dtransformer.parallel.tracing import trace
from dtransformer.trainers.loss_terms import Counted, check_loss, check_range, share_of

_BY_SHAPE = "crossentropy", "ce"  # which Keras chooses by the shapes of an output
_COUNTS = len(Counted._fields)  # of each output's labels


class Objective:
    """The weighted sum of the losses of a network's outputs.

    Args:
        loss: as `keras.Model.compile` takes it: None, a Keras loss, its name, a function of
            (y_true, y_pred), or dicts and lists of them, one for each output. Or a
            `CrossEntropyLoss`, or any other object with its `per_token` and `token_weights`.
        loss_weights: None, or numbers in the same structure.
        output_names: list of the names of the network's outputs, where it has them.

    Attributes:
        losses: list of the losses, as given.

    Raises:
        ValueError: a loss is none of these, or has no reduction to a scalar.
    """

    def __init__(self, loss, loss_weights=None, output_names=None):
        self._losses, self._weights, self._names = loss, loss_weights, output_names
        self.losses = [one for one in keras.tree.flatten(loss) if one is not None]
        for one in self.losses:
            if not hasattr(one, "per_token") and one not in _BY_SHAPE:
                check_loss(keras.losses.get(one))

    @property
    def is_of_tokens(self) -> bool:
        """Whether it is one loss of tokens, of which epochs' means are weighted by their number."""
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
        """Whether it is known before the forward pass what sums of losses are divided by."""
        return all(
            not hasattr(one, "per_token") or hasattr(one, "token_weights") for one in self.losses
        )

    def check_class_weight(self, labels) -> None:
        """Refuse class weights for token labels.

        Keras would weight rows, by the position of their largest label.

        Args:
            labels: Labels, or their spec.

        Raises:
            ValueError: If the labels are class ids [b, s] or [b, s, ...].
        """
        shape = getattr(labels, "shape", ())
        has_ids = self.is_of_tokens or "sparse_categorical_crossentropy" in str(self.losses)
        if has_ids and len(shape) > 1 and shape[-1] != 1:
            raise ValueError(
                f"`class_weight` weights rows, and the labels of shape {tuple(shape)} are class ids of "
                "tokens. Pass `sample_weight` in the labels' shape instead: the weight of each "
                "label's class."
            )

    def counts(self, inputs, labels, sample_weight) -> tf.Tensor:
        """Return what is counted before the forward pass, to be added up over the ranks.

        Args:
            inputs, labels: nested tensors [b, ...].
            sample_weight: tensor or nested tensors [b, ...], or None.

        Returns:
            A float32 tensor [1 + 3·n]: the number of rows, and a `Counted` for each of the n
            tensors of labels.
        """
        rows = tf.shape(keras.tree.flatten(inputs)[0])[0]
        return tf.stack([tf.cast(rows, "float32"), *self._label_counts(labels, sample_weight)])

    def name_of(self, name: str) -> str:
        """Return what a user knows a loss by, of its name in the `sums`."""
        if name != "loss":
            return f"the loss of {name.removeprefix('loss/')}"
        loss = (self.losses or ["that layers add"])[0]
        return f"the loss {getattr(loss, 'name', None) or getattr(loss, '__name__', loss)}"

    @staticmethod
    def rows(counts) -> tf.Tensor:
        """Return the number of rows of a batch, of its `counts`."""
        return counts[0]

    @staticmethod
    def counted(counts, number: int) -> Counted:
        """Return the `Counted` of one of the tensors of labels, of a batch's `counts`."""
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
            losses = [loss for loss in losses if loss is not None]  # as Keras pairs them
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
                tokens = size  # a guess
            counts += [size, total, tokens]
        return counts

    def sums(self, outputs, labels, sample_weight, counts, own_is_all: bool) -> dict:
        """Return this share's sums, which add up over ranks and micro-batches.

        Args:
            outputs, labels, sample_weight: nested tensors [b, ...].
            counts: as from `counts`, of the global batch; it may be longer.
            own_is_all: whether this share is the global batch.

        Returns:
            A dict of float32 scalars: `"loss"`, the part of the loss, alone where layers add all
            that there is; `"loss/NAME"` of each
            loss where there are several; `"divided"` where the loss still has to be divided
            by its sum; `"counted"`, the weight of the labels, or the rows where there are
            several losses; `"right"` of a loss of tokens, the weight of those that are predicted.

        Raises:
            ValueError: several losses are divided by what is only known after the forward pass.
        """
        if not self.losses:
            return {"loss": tf.zeros([])}
        if not trace.is_on_mesh():  # labels are checked where they are counted, before all else
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
                    "several losses of which one is a mean over a mask need the whole batch at "
                    "once: train it on one data shard with micro_batch_num=1, or give sample "
                    "weights and mean_with_sample_weight instead of the mask"
                )
            return {**sums, "counted": tf.cast(tf.shape(flat[0])[0], "float32")}
        (share,) = shares.values()
        if share.divided is not None:
            sums["divided"] = share.divided
        found = _accuracy(*seen, share.weights)
        if not self.is_of_tokens:  # Keras shows what `metrics` asks for
            found.pop("right", None)
        return {**sums, **found}


def _label_checks(labels, loss):
    """Return operations that fail where labels of a loss of tokens are no numbers of classes."""
    if not labels.dtype.is_integer:
        raise ValueError(
            f"{type(loss).__name__} takes the numbers of classes, and the labels are "
            f"{labels.dtype.name}: cast them to int32"
        )
    ignored, size = getattr(loss, "ignore_id", None), getattr(loss, "vocab_size", None)
    name = "labels" if ignored is None else f"labels other than ignore_id={ignored}"
    if ignored is not None:
        labels = tf.boolean_mask(labels, labels != ignored)
    return [check_range(labels, name, size)]


def _one_each(given, number):
    """Return a list of the sample weights, or of the losses, of a number of label tensors."""
    each = keras.tree.flatten(given) if given is not None else [None]
    return each if len(each) == number else each[:1] * number


def _position(tensor, flat):
    return next(i for i, x in enumerate(flat) if x is tensor)


def _accuracy(outputs, labels, weights):
    """Return the sums of a classifier's accuracy, `"right"` and `"counted"`."""
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


# Logits that are wider than their vocabulary: losses and outputs without the padding.


def of_classes(loss, network):
    """Return a loss of so many classes as an output of a network has, where it is of tokens.

    Args:
        loss: as of `keras.Model.compile`, a dict of losses where the network has several outputs.
        network: a `keras.Model`.
    """
    return _of_sizes(loss, _sizes(network))


def _of_sizes(loss, sizes):
    if isinstance(loss, dict) and isinstance(sizes, dict):
        return {name: _of_sizes(one, sizes.get(name)) for name, one in loss.items()}
    if isinstance(loss, CrossEntropyLoss) and isinstance(sizes, int):
        return loss.of_classes(sizes)
    return loss


def without_padding(outputs, network):
    """Return the outputs of a network without the padding of its logits."""
    sizes = _sizes(network)
    if sizes is None:
        return outputs
    return tf.nest.map_structure(lambda x, size: x[..., :size], outputs, sizes)


def _sizes(network):
    return network.logits_vocab_size() if hasattr(network, "logits_vocab_size") else None
