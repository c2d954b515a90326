"""Runs: one config, one folder, one command for everything that is trained.

A task is a file of `tasks`: what its records are, its tokenizer, network, batches, loss and metrics.
All else is shared, and knows no task: `config` (on `options`), `run`, the `folder` and what belongs
to it (`identity`, `callbacks`), the `optimizers`, and the `networks` that tasks train.
"""
