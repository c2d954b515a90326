"""Saves experts and sharded sequences, and restores them over other numbers of shards."""

from tests.distributed.tasks.checkpoints import (
    OTHER_SEED,
    STEPS_AFTER,
    STEPS_BEFORE,
    checkpoint_of,
    losses,
    new_trainer,
    restore,
)

# Of each network, who saves and who restores; one process does, too.
EXPERTS, LONG = "deep_moe", "deep_long_causal"
SAVING = {
    EXPERTS: ("dp4ep2@2x2", "dp4ep2@2x2+shard1", "dp4ep2@2x2+shard2"),
    LONG: ("cp2@2x1+ring",),
}
RESTORING = {
    EXPERTS: ("dp2@2x1+shard1", "dp8ep4@2x4", "dp8ep4@2x4+shard2"),
    LONG: ("cp4@2x2+ulysses",),
}


def network_of(layout):
    """Return the name of the network of a layout."""
    return LONG if layout.context > 1 else EXPERTS


def save(folder, layout):
    """Train, save, and go on; return the losses after it."""
    network = network_of(layout)
    trainer = new_trainer(network)
    losses(trainer, 0, STEPS_BEFORE, network)
    trainer.save(checkpoint_of(folder, layout.name))
    return {"after": losses(trainer, STEPS_BEFORE, STEPS_AFTER, network)}


def restore_all(folder, layout):
    """Go on from what each layout has saved; return the losses."""
    return {"restored": restored(folder, layout.name, network_of(layout))}


def restored(folder, name, network):
    """As `restore_all`, of the layout with a name."""
    trainer = new_trainer(network, OTHER_SEED)
    return {saved: restore(trainer, folder, saved, name, network) for saved in SAVING[network]}


TASKS = {task.__name__: task for task in (save, restore_all)}
