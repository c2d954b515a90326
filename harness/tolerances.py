"""How far a job may be from one process after 20 steps in float32."""

PARITY_LOSS = 1e-5  # of a step's loss, relative
PARITY_WEIGHTS = 2e-5  # of an element of a weight
PARITY_LOGITS = 1e-4

# Of a step's loss in 16 bits: some epsilons of the type, 8e-3 and 1e-3. Of weights nothing is
# promised: Adam moves them by rounding noise, too.
PARITY_LOSS_16_BITS = {"mixed_bfloat16": 2e-2, "mixed_float16": 5e-3}
