"""Hint: bfloat16 weights may allow a far simpler layout than mixed precision."""

import dataclasses

from dtransformer.planner.search import TIE_SHARE, Plan, plan

_MAX_CANDIDATES = 200
_FEWER_TECHNIQUES = 2


def bfloat16_hint(current: Plan) -> str:
    """Return a hint if bfloat16 weights allow a far simpler layout, otherwise an empty string.

    Far simpler means that at least two techniques are dropped (a kind of parallelism, a
    pipeline schedule, recomputation; `optimizer_shard` does not count), or that only data
    parallelism remains. The simpler layout must be as fast as the plan's best one. If no
    layout of the plan fits, every layout that fits in bfloat16 is far simpler.

    Args:
        current: A plan. Without the precision "mixed_bfloat16" there is no hint.
    """
    if current.job.precision != "mixed_bfloat16":
        return ""
    job = dataclasses.replace(current.job, precision="bfloat16")
    bfloat16_plan = plan(current.model, current.cluster, job, _MAX_CANDIDATES)
    best = current.best if current.fits else bfloat16_plan.best
    candidates = [
        x for x in bfloat16_plan.costs if x.step_seconds <= best.step_seconds * (1 + TIE_SHARE)
    ]
    if not (bfloat16_plan.fits and candidates):
        return ""
    simplest = min(candidates, key=_complexity)
    drops = best.num_techniques - simplest.num_techniques
    is_simpler = drops >= (_FEWER_TECHNIQUES if simplest.num_techniques else 1)
    if current.fits and not is_simpler:
        return ""
    note = "Adapters stay in float32."
    if not current.model.adapter_rank:
        note = "Small updates are then rounded away, so prefer it for adapters."
    return (
        f"{'Simpler' if current.fits else 'It fits'} with --precision bfloat16, which stores the "
        f"weights in 16 bits: {simplest.layout}, {simplest.step_seconds:,.4g} s/step, "
        f"{simplest.memory_bytes / 1e9:,.3g} GB/device. {note}"
    )


def _complexity(cost):
    return cost.num_techniques, cost.config.optimizer_shard, cost.step_seconds
