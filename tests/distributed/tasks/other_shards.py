"""Save experts and sharded sequences, and restore them with other numbers of shards."""

from tests.distributed.tasks.checkpoints import (
    OTHER_SEED,
    STEPS_AFTER,
    STEPS_BEFORE,
    checkpoint_path,
    losses,
    new_trainer,
    restore,
)

# Network -> layouts that save, and layouts that restore. One process also restores each checkpoint.
EXPERTS, LONG = "deep_moe", "deep_long_causal"
SAVING = {
    EXPERTS: ("dp4ep2@2x2", "dp4ep2@2x2+shard1", "dp4ep2@2x2+shard2"),
    LONG: ("cp2@2x1+ring",),
}
RESTORING = {
    EXPERTS: ("dp2@2x1+shard1", "dp8ep4@2x4", "dp8ep4@2x4+shard2"),
    LONG: ("cp4@2x2+ulysses",),
}


def network_name(layout):
    """Return the name of the network that a layout trains."""
    return LONG if layout.context > 1 else EXPERTS


def save(folder, layout):
    """Train, save and continue, and return the losses after saving."""
    network = network_name(layout)
    trainer = new_trainer(network)
    losses(trainer, 0, STEPS_BEFORE, network)
    trainer.save(checkpoint_path(folder, layout.name))
    return {"after": losses(trainer, STEPS_BEFORE, STEPS_AFTER, network)}


def restore_all(folder, layout):
    """Resume from the checkpoint of each layout and return the losses."""
    return {"restored": restored(folder, layout.name, network_name(layout))}


def restored(folder, name, network):
    """Resume from each checkpoint on the layout with this name and return the losses."""
    trainer = new_trainer(network, OTHER_SEED)
    return {saved: restore(trainer, folder, saved, name, network) for saved in SAVING[network]}


TASKS = {task.__name__: task for task in (save, restore_all)}
