"""Losses for chosen and rejected answers, and for reward models.

References:

- [Rafailov et al., 2023](https://arxiv.org/abs/2305.18290) (DPO)
- [Azar et al., 2023](https://arxiv.org/abs/2310.12036), for `"ipo"`
- [Zhao et al., 2023](https://arxiv.org/abs/2305.10425) (SLiC-HF), for `"hinge"`
- [Meng et al., 2024](https://arxiv.org/abs/2405.14734), for `"simpo"`
- [Hong et al., 2024](https://arxiv.org/abs/2403.07691), for `"orpo"`
- [Touvron et al., 2023](https://arxiv.org/abs/2307.09288) (Llama 2), section 3.2.2, for reward
margins
"""

import keras
import tensorflow as tf

from dtransformer.layers.base import Layer
from dtransformer.parallel.tensor_parallel.chunked_cross_entropy import head_nll
from dtransformer.preference_losses import PREFERENCE_LOSSES, SMOOTHED_LOSSES


class SequenceLogProbability(Layer):
    """Sum the log-likelihoods of each sequence's labels.

    Args:
        vocab_size: Integer. Number V of entries. Logits above are padding.
        mean: Boolean, whether to return the mean over weighted labels instead. Defaults to `False`.

    Call arguments:
        logits: Tensor of shape `[b, s, V']`.
        labels: Integer tensor of shape `[b, s]`. Negative labels, such as -100, have no weight.

    Output shape:
        `[b]`, float32
    """

    pipeline_stage = -1

    def __init__(self, vocab_size: int, mean: bool = False, **kwargs):
        super().__init__(autocast=False, **kwargs)
        self.vocab_size = vocab_size
        self.mean = mean

    def call(self, logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        counts = tf.cast(labels >= 0, "float32")
        values = head_nll(logits, tf.maximum(labels, 0), vocab_size=self.vocab_size)
        total = -tf.reduce_sum(values * counts, axis=1)
        return tf.math.divide_no_nan(total, tf.reduce_sum(counts, 1)) if self.mean else total

    def compute_output_shape(self, logits_shape: tuple, labels_shape: tuple) -> tuple:
        return logits_shape[:1]


def margins(reference: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    """Return the gain of the chosen answer over the reference, minus the rejected answer's gain.

    Args:
        reference: Tensor of shape `[b, 2]`, log-likelihoods of the chosen and the rejected answer
            under the reference model.
        values: Tensor of shape `[b, 2]`, log-likelihoods under the trained model.

    Returns:
        A tensor of shape `[b]`.
    """
    gained = values - reference
    return gained[:, 0] - gained[:, 1]


class PreferenceLoss(keras.losses.Loss):
    """Loss of a chosen and a rejected answer.

    With the log-likelihoods c and r of the two answers and the margin h (see `margins`):

    | kind | loss | likelihoods |
    |---|---|---|
    | `"sigmoid"` | −(1−ε)·log σ(β·h) − ε·log σ(−β·h) | sums over tokens |
    | `"sigmoid_norm"` | as `"sigmoid"` | means over tokens |
    | `"hinge"` | max(0, 1 − β·h) | sums over tokens |
    | `"ipo"` | (h − 1/(2β))² | means over tokens |
    | `"simpo"` | as `"sigmoid"`, with β·(c − r) − γ instead of β·h | means over tokens |
    | `"orpo"` | −c − β·log σ(log odds(c) − log odds(r)), odds(x) = eˣ / (1 − eˣ) | means over tokens |

    Args:
        kind: String, see the table. Defaults to `"sigmoid"`.
        beta: Float above 0. The factor β, called λ in the ORPO paper. Defaults to `0.1`.
        smoothing: Float in [0, 0.5). Label smoothing ε. Defaults to `0.0`.
        simpo_gamma: Float. The target margin γ of `"simpo"`. Defaults to `0.5`.

    Raises:
        ValueError: If an argument is out of range, or `smoothing` is combined with a kind that has
            no ε.
    """

    weights_epoch_means = True

    def __init__(
        self,
        kind: str = "sigmoid",
        beta: float = 0.1,
        smoothing: float = 0.0,
        simpo_gamma: float = 0.5,
    ):
        super().__init__("preference", "mean_with_sample_weight")
        if kind not in PREFERENCE_LOSSES:
            raise ValueError(
                f"`kind={kind!r}` is unknown. Choose one of {', '.join(PREFERENCE_LOSSES)}."
            )
        if beta <= 0 or not 0 <= smoothing < 0.5:
            raise ValueError(
                f"`beta={beta}` must be above 0, and `smoothing={smoothing}` must be in [0, 0.5)."
            )
        if smoothing and kind not in SMOOTHED_LOSSES:
            raise ValueError(
                f"`smoothing` requires a kind of {', '.join(SMOOTHED_LOSSES)}, got {kind!r}. Remove "
                "`smoothing`."
            )
        self.kind = kind
        self.beta = beta
        self.smoothing = smoothing
        self.simpo_gamma = simpo_gamma

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        if self.kind == "orpo":
            chosen = y_pred[:, 0]
            log_odds = _log_odds(chosen) - _log_odds(y_pred[:, 1])
            return -chosen - self.beta * tf.math.log_sigmoid(log_odds)
        h = margins(y_true, y_pred)
        if self.kind == "ipo":
            return tf.square(h - 1 / (2 * self.beta))
        if self.kind == "hinge":
            return tf.nn.relu(1 - self.beta * h)
        logit = self.beta * h
        if self.kind == "simpo":
            logit -= self.simpo_gamma
        wrong = self.smoothing * tf.math.log_sigmoid(-logit)
        return -(1 - self.smoothing) * tf.math.log_sigmoid(logit) - wrong


def _log_odds(x):
    """Return log(eˣ / (1 − eˣ)) of log-probabilities."""
    # Rows of padding have a log-probability of 0, whose odds are infinite.
    x = tf.minimum(x, -1e-6)
    return x - tf.math.log(-tf.math.expm1(x))


class RewardLoss(keras.losses.Loss):
    """Loss of the rewards of a chosen and a rejected answer: −log σ(r_c − r_r − margin).

    Labels are float [b, 2]: the margin, and an unused number. Outputs are the rewards [b, 2].

    Args:
        center_rewards: Factor of (r_c + r_r)², which draws the mean reward to 0, such as 0.01
            (Eisenstein et al., 2023, arXiv 2312.09244). Defaults to `None`, which adds nothing.
    """

    weights_epoch_means = True

    def __init__(self, center_rewards: float | None = None):
        super().__init__("reward", "mean_with_sample_weight")
        self.center_rewards = center_rewards or 0.0

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        difference = y_pred[:, 0] - y_pred[:, 1] - y_true[:, 0]
        penalty = self.center_rewards * tf.square(y_pred[:, 0] + y_pred[:, 1])
        return penalty - tf.math.log_sigmoid(difference)
