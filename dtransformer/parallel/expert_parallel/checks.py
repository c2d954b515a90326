"""Checks of a mixture of experts against the layout, before anything is built."""

from dtransformer.parallel.config.config import MoEConfig, get_parallel_config
from dtransformer.parallel.runtime import job


def check_moe_config(config: MoEConfig) -> None:
    """Check that the fields of a `MoEConfig` work together.

    Raises:
        ValueError: If fields conflict. The message has their names and values.
    """
    experts = config.expert_num
    chosen = config.num_experts_chosen
    if chosen > experts:
        raise ValueError(f"`num_experts_chosen={chosen}` must not exceed `expert_num={experts}`.")
    groups = config.routing_groups
    chosen_groups = config.routing_groups_chosen
    if experts % groups:
        raise ValueError(f"`routing_groups={groups}` must divide `expert_num={experts}`.")
    if chosen_groups > groups:
        raise ValueError(
            f"`routing_groups_chosen={chosen_groups}` must not exceed `routing_groups={groups}`."
        )
    if chosen > chosen_groups * (experts // groups):
        raise ValueError(
            f"`num_experts_chosen={chosen}` must not exceed the number of experts in "
            f"`routing_groups_chosen={chosen_groups}` groups of {experts // groups}."
        )


def check_layout(config: MoEConfig) -> None:
    """Check that the parallel config supports a `MoEConfig`.

    Raises:
        ValueError: If it does not. The message has a config that works.
    """
    parallel = get_parallel_config()
    shards = parallel.expert_parallel
    if config.expert_num % shards:
        raise ValueError(
            f"`expert_parallel={shards}` must divide `expert_num={config.expert_num}`, because each "
            "rank has the same number of experts."
        )
    if not needs_the_batch(config):
        return
    fix = (
        "Set `expert_group_size` to at most the number of tokens of one sequence. The tokens of a "
        "group share the capacity of the experts."
    )
    if parallel.micro_batch_num > 1:
        raise ValueError(
            "`expert_group_size=None` forms one group of all tokens of the global batch. It does not "
            f"work with `micro_batch_num={parallel.micro_batch_num}`, because a micro-batch is "
            f"computed before the next one is known. {fix}"
        )
    if job.has_mesh_replicas():
        raise ValueError(
            "`expert_group_size=None` forms one group of all tokens of the global batch. It does not "
            f"work with {job.data_shard()[1]} replicas of a mesh, which do not exchange counts during "
            f"the computation. {fix}"
        )


def needs_the_batch(config: MoEConfig) -> bool:
    """Return whether the result for a token depends on all other tokens of the global batch.

    This is the case without an `expert_group_size` if experts have a capacity, or if a loss or the
    sigmoid router's bias uses the load.
    """
    if config.expert_group_size is not None:
        return False
    uses_load = config.aux_loss_factor or config.z_loss_factor or config.router_type == "sigmoid"
    return bool(uses_load) or not config.dropless


def sends_counts(config: MoEConfig) -> bool:
    """Return whether ranks exchange the number of tokens for each expert."""
    return needs_the_batch(config) and job.mesh() is None and job.data_shard()[1] > 1
