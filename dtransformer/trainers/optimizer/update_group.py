"""Groups of weights with other learning rates and weight decay."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class UpdateGroup:
    """Hyperparameters of the weights that have this group as attribute `update_group`.

    Args:
        rate_factor: Float. Factor on the optimizer's learning rate. Defaults to `1.0`.
        weight_decay: Float. Weight decay of the group. `None` keeps the optimizer's.
        uses_adamw: Boolean. Whether `dtransformer.trainers.Muon` updates the matrices of the group
            with AdamW. Defaults to `False`.
    """

    rate_factor: float = 1.0
    weight_decay: float | None = None
    uses_adamw: bool = False
