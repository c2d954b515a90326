"""Seeds of initial weights and dropout masks, all derived from the job's seed."""

import hashlib
import json

from dtransformer.parallel.runtime import job


def derived_seed(*names):
    """Return a seed in [0, 2³¹) that depends only on the job's seed and `names`.

    Args:
        *names: Strings and numbers, such as the path of a weight.
    """
    text = json.dumps([job.seed(), *names])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little") >> 1
