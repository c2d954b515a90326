"""Seeds of initial weights and dropout masks: all are derived from the job's."""

import hashlib
import json

from dtransformer.parallel.runtime import job


def derived_seed(*names):
    """Return a seed in [0, 2³¹) that depends on the job's seed and `names` only.

    Args:
        *names: strings and numbers, such as the path of a weight.
    """
    text = json.dumps([job.seed(), *names])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little") >> 1
