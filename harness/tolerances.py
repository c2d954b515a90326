"""Maximum differences from a single process after 20 steps in float32."""

PARITY_LOSS = 1e-5  # Relative difference of a step's loss.
PARITY_WEIGHTS = 2e-5  # Absolute difference of a weight's element.
PARITY_LOGITS = 1e-4

# Relative difference of a step's loss in 16 bits: a few epsilons of the dtype, 8e-3 and 1e-3.
# Weights have no bound, because Adam amplifies rounding noise.
PARITY_LOSS_16_BITS = {"mixed_bfloat16": 2e-2, "mixed_float16": 5e-3}
