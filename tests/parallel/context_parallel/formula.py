"""Formula for the communication of attention over a sharded sequence."""


def elements_sent(plan, b, n, m, d):
    """Return the number of elements that a device sends in one forward and one backward pass.

    Args:
        plan: `ContextPlan`.
        b: Number of rows on the device.
        n: Number of query heads.
        m: Number of key heads.
        d: Features per head.

    Returns:
        A dict with the keys `forward` and `backward`.
    """
    queries = b * n * d * plan.num_queries // plan.shards
    keys = b * m * d * plan.num_keys // plan.shards
    num_peers = plan.shards - 1
    keys *= max(plan.head_parts // m, 1)
    if plan.has_all_positions:
        total = num_peers * (2 * queries + 2 * keys) // plan.shards
        return {"forward": total, "backward": total}
    striped = num_peers * 2 * queries // plan.shards if plan.is_striped else 0
    keys = num_peers * 2 * keys // plan.head_parts
    return {"forward": striped + keys, "backward": striped + 2 * keys}
