"""How far a job may be from one process after 20 steps in float32."""

PARITY_LOSS = 1e-5  # of a step's loss, relative
PARITY_WEIGHTS = 2e-5  # of an element of a weight
PARITY_LOGITS = 1e-4
