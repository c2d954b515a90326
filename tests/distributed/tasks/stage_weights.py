"""Read, set, save and restore the weights of a network on two pipeline stages."""

import pathlib

import keras
import numpy as np

import dtransformer
from dtransformer.layers import CrossEntropyLoss
from dtransformer.models import CausalLM, add_lora, freeze, merge_lora
from dtransformer.parallel.runtime import job
from dtransformer.trainers import Trainer

IDS = np.random.default_rng(0).integers(1, 20, (8, 7)).astype("int32")
X, Y = IDS[:, :-1], IDS[:, 1:]


def arrays(name, values):
    """Return a dict of the values, with keys "NAME/INDEX"."""
    return {f"{name}/{i:02}": np.asarray(value) for i, value in enumerate(values)}


def language_model(**options):
    dtransformer.set_seed(3)
    network = CausalLM(
        20,
        hidden_size=8,
        num_heads=2,
        ffn_hidden_size=16,
        dropout_rate=0.0,
        **{"num_layers": 4, **options},
    )
    network.build()
    return network


def fit(trainer, x, y, **options):
    return trainer.fit(x, y, batch_size=8, verbose=0, shuffle=False, **options)


class LossThatRises(keras.callbacks.Callback):
    """Replace the logged loss, so that the first epoch is the best one."""

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 0:
            self.first_weights = self.model.get_weights()
        logs["rising"] = float(epoch)


def get_adapter_weights(folder, layout, kind):
    """Read, set, restore, load and merge the weights of a network with adapters."""
    network = language_model(num_layers=2)
    add_lora(network, rank=2, alpha=4.0, kind=kind, targets=["*query_kernel", "*mapping_kernel"])
    trainer = Trainer(network)
    trainer.compile(keras.optimizers.SGD(0.5), CrossEntropyLoss(ignore_id=0))
    result = arrays("first", network.get_weights())
    result["parameters"] = network.count_params()
    changed = [weight + 0.1 * (1 + i) for i, weight in enumerate(trainer.get_weights())]
    network.set_weights(changed)
    result |= arrays("set", trainer.get_weights())

    rising = LossThatRises()
    best = keras.callbacks.EarlyStopping(
        "rising", mode="min", patience=1, restore_best_weights=True
    )
    fit(trainer, X, Y, epochs=4, callbacks=[rising, best])
    result |= arrays("best", rising.first_weights)
    result |= arrays("restored", network.get_weights())

    file = pathlib.Path(folder) / f"{kind}-{layout.name}.weights.h5"
    network.save_weights(file)
    job.barrier()
    network.set_weights([np.zeros_like(weight) for weight in network.get_weights()])
    network.load_weights(file)
    result |= arrays("loaded", network.get_weights())
    result["outputs"] = trainer.predict(X, verbose=0)
    merge_lora(network)
    result |= arrays("merged", network.get_weights())
    return result


def lora(folder, layout):
    return get_adapter_weights(folder, layout, "lora")


def dora(folder, layout):
    return get_adapter_weights(folder, layout, "dora")


class Frozen(keras.layers.Layer):
    """A layer with a frozen and a trained part, and a weight that is never trained."""

    def build(self, shape):
        self.offset = self.add_weight(
            shape=(shape[-1],), initializer="ones", trainable=False, name="offset"
        )
        self.factor = self.add_weight(shape=(shape[-1],), initializer="ones", name="factor")
        self.inner = keras.layers.Dense(shape[-1], trainable=False)
        self.inner.build(shape)
        self.norm = keras.layers.BatchNormalization(momentum=0.5)
        self.norm.build(shape)

    def call(self, x, training=False):
        return self.norm(self.inner(x) * self.factor + self.offset, training=training)


def untrained(folder, layout):
    """Return weights of frozen and normalizing layers, trained with averaged weights."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6,))
    x = keras.layers.Dense(8, activation="tanh")(inputs)
    for _ in range(2):
        x = Frozen()(x)
    x = keras.layers.Dense(8, activation="tanh", name="still")(x)
    network = keras.Model(inputs, keras.layers.Dense(6)(keras.layers.BatchNormalization()(x)))
    network.get_layer("still").trainable = False
    trainer = Trainer(network)
    trainer.compile(keras.optimizers.SGD(0.5, use_ema=True, ema_momentum=0.5), "mse")
    result = {}

    def keep(epoch, logs):
        if epoch == 1:
            result.update(arrays("trained", network.get_weights()))

    x = np.float32(X)
    trainer.predict(x, verbose=0)  # Stages are chosen with the first batch.
    result |= arrays("first", network.get_weights())
    checkpoint = pathlib.Path(folder) / f"best-{layout.name}.weights.h5"
    rising = LossThatRises()
    callbacks = [
        rising,
        keras.callbacks.ModelCheckpoint(
            checkpoint, "rising", mode="min", save_best_only=True, save_weights_only=True
        ),
        keras.callbacks.LambdaCallback(on_epoch_end=keep),
    ]
    fit(trainer, x, x, epochs=3, callbacks=callbacks)
    result |= arrays("averaged", network.get_weights())
    network.load_weights(checkpoint)
    result |= arrays("best", rising.first_weights)
    result |= arrays("restored", network.get_weights())
    result["parameters"] = network.count_params()
    network.set_weights([2 * weight for weight in network.get_weights()])
    result |= arrays("doubled", trainer.get_weights())
    trainer.set_weights([np.ones_like(weight) for weight in trainer.get_weights()])
    return result | arrays("ones", network.get_weights())


def frozen_blocks(folder, layout):
    """Train a language model with experts and half of the blocks frozen, and return the weights."""
    network = language_model(moe_config=dtransformer.MoEConfig(expert_num=2, expert_group_size=6))
    freeze(network, ["embedding/*", "blocks/block_[0-1]/*"])
    trainer = Trainer(network)
    trainer.compile(keras.optimizers.SGD(0.5), CrossEntropyLoss(ignore_id=0))
    fit(trainer, X, Y, epochs=2)
    result = arrays("trained", network.get_weights())
    network.set_weights([2 * weight for weight in network.get_weights()])
    result |= arrays("set", network.get_weights())
    result["parameters"] = network.count_params()
    return result


TASKS = {
    "lora": lora,
    "dora": dora,
    "untrained": untrained,
    "frozen_blocks": frozen_blocks,
}
