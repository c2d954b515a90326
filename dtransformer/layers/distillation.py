"""Loss of a student that learns from the logits of a frozen teacher."""

from dtransformer.layers.base import check_rate, register
from dtransformer.layers.loss import CrossEntropyLoss
from dtransformer.parallel.tensor_parallel.chunked_cross_entropy import head_losses
from dtransformer.parallel.tensor_parallel.cross_entropy import token_nll
from dtransformer.parallel.tensor_parallel.divergence import DIVERGENCES, token_divergence


@register
class DistillationLoss(CrossEntropyLoss):
    """Cross entropy of the labels, mixed with the divergence from a teacher's distribution.

    With the weight w and the temperature T, a token's loss is w · nll + (1 − w) · T² · KL. The
    divergence compares softmax(logits / T) of both networks. Pass the teacher to
    `Trainer.compile(..., teacher=...)`. The logs contain nll as `hard_loss` and KL as `kl_loss`.

    Reference:
        - [Hinton et al., 2015](https://arxiv.org/abs/1503.02531)
        - [Gu et al., 2023](https://arxiv.org/abs/2306.08543), for `"reverse_kl"`

    Args:
        temperature: Float above 0. The temperature T. Defaults to `2.0`.
        hard_loss_weight: Float in [0, 1). The weight w. Defaults to `0.5`.
        divergence: `"forward_kl"` for KL(teacher ‖ student), or `"reverse_kl"` for
            KL(student ‖ teacher). Defaults to `"forward_kl"`.
        **kwargs: Arguments of `CrossEntropyLoss`. Label smoothing and `z_loss` only change nll.

    Raises:
        ValueError: If an argument is out of range.

    Example:

    >>> loss = DistillationLoss(temperature=1.0, hard_loss_weight=0.0)
    >>> logits = tf.constant([[0.0, 1.0]])
    >>> logits.teacher_logits = logits
    >>> float(loss(logits, tf.constant([0])))
    0.0
    """

    def __init__(
        self,
        temperature: float = 2.0,
        hard_loss_weight: float = 0.5,
        divergence: str = "forward_kl",
        **kwargs,
    ):
        super().__init__(**kwargs)
        if temperature <= 0 or divergence not in DIVERGENCES:
            raise ValueError(
                f"`temperature={temperature}` must be above 0, and `divergence={divergence!r}` must be "
                f"one of {', '.join(DIVERGENCES)}."
            )
        self.temperature = temperature
        self.hard_loss_weight = check_rate("hard_loss_weight", hard_loss_weight)
        self.divergence = divergence

    def _values(self, logits, labels, **options):
        teacher_logits = getattr(logits, "teacher_logits", None)
        if teacher_logits is None:
            raise ValueError(
                "DistillationLoss received logits without teacher logits. Pass the teacher to "
                "`Trainer.compile(..., teacher=...)`."
            )
        soft_options = self.divergence, self.temperature, options["vocab_size"]

        def compute(logits, labels, teacher_logits):
            kl = token_divergence(logits, teacher_logits, *soft_options)
            return [token_nll(logits, labels, **options), kl]

        hard, kl = head_losses(compute, logits, labels, self.chunk_tokens, teacher_logits)
        logits.loss_parts = {"hard": hard, "kl": kl}  # The logs contain their means.
        soft_weight = (1 - self.hard_loss_weight) * self.temperature**2
        return self.hard_loss_weight * hard + soft_weight * kl
