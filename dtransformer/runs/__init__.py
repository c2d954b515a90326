"""Training runs: every task uses one config, one run folder and one command.

Each module in `tasks` defines one task: its records, tokenizer, network, batches, loss and metrics.
All other modules are independent of the task: `config` and `options` for the config file, `run` for
training, `folder` and `identity` for the run folder, `callbacks`, `optimizers` and `networks`.
"""
