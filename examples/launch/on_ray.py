"""Train on a Ray cluster, where `horovod.ray` starts the ranks.

python examples/launch/on_ray.py --hosts 4 --ranks-per-host 8

All hosts need Ray and Horovod. The script restarts the ranks after a failure.
"""

import argparse


def train(folder):
    """Train on each rank. Replace this function with your training."""
    import keras
    import numpy as np

    import dtransformer
    from dtransformer.layers import CrossEntropyLoss
    from dtransformer.models import CausalLM
    from dtransformer.trainers import ModelCheckpoint

    dtransformer.init()
    ids = np.random.default_rng(0).integers(4, 100, (256, 17)).astype("int32")
    trainer = dtransformer.Trainer(CausalLM(100, hidden_size=64, num_heads=4, num_layers=2))
    trainer.compile(keras.optimizers.AdamW(1e-3), CrossEntropyLoss(ignore_id=0))
    history = trainer.fit(
        ids[:, :-1],
        ids[:, 1:],
        batch_size=32,
        epochs=3,
        shuffle=False,
        callbacks=[ModelCheckpoint(folder)],
        resume=True,
    )
    dtransformer.shutdown()
    return history.history["loss"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument("--gpus", action="store_true", help="use one GPU per rank")
    parser.add_argument(
        "--folder", default="checkpoints", help="folder for checkpoints, shared by all hosts"
    )
    parser.add_argument("--restarts", type=int, default=3)
    args = parser.parse_args()

    import ray
    from horovod.ray import RayExecutor

    ray.init(address="auto" if args.hosts > 1 else None)
    for attempt in range(args.restarts + 1):
        executor = RayExecutor(
            RayExecutor.create_settings(timeout_s=120),
            num_hosts=args.hosts,
            num_workers_per_host=args.ranks_per_host,
            use_gpu=args.gpus,
        )
        executor.start()
        try:
            print(executor.run(train, args=[args.folder])[0])
            break
        except ray.exceptions.RayError:
            if attempt == args.restarts:
                raise
        finally:
            executor.shutdown()


if __name__ == "__main__":
    main()
