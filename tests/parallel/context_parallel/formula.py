"""What attention of a sharded sequence sends, by the theory."""


def elements_sent(plan, b, n, m, d):
    """Return the elements that a device sends under a `ContextPlan`, forward and backward.

    It has b rows, n heads of queries, m of keys, and d features of a head.
    """
    queries = b * n * d * plan.num_queries // plan.shards
    keys = b * m * d * plan.num_keys // plan.shards
    others = plan.shards - 1
    if plan.has_all_positions:
        keys *= max(plan.shards // m, 1)
        total = others * (2 * queries + 2 * keys) // plan.shards
        return {"forward": total, "backward": total}
    striped = others * 2 * queries // plan.shards if plan.is_striped else 0
    return {"forward": striped + others * 2 * keys, "backward": striped + 2 * others * 2 * keys}
