"""What tests and benchmarks share: ranks that are started, layouts, and small networks.

Not part of the installed package. From the bottom up:

    launch.py      starts a program on several ranks, bounded in time
    printed.py     JSON that such programs print
    layouts.py     how a job may be divided, by name
    networks.py    small networks and their optimizers, by name
    batches.py     what they are trained on
    training.py    trains a network, and uses it in every other way
    tasks.py       other small trainings, each with an option of its own
    stateful.py    networks whose layers set states, own metrics, add losses, or leave masks
    runs.py        a task under a layout; the files with what its ranks give
    rank.py        the program that runs them on a rank
    quick.py       what tests leave out to compile quickly
    compare.py     differences from one process, within tolerances.py
    measure.py     a larger network, and what memory a step takes: for benchmarks
    code_size.py   size of the code in tokens, for the budget in tests/test_house.py
    prose.py       search for stilted English, for the ceilings in tests/test_prose.py
    published_tables/   published figures beside the planner's
"""

import dtransformer  # noqa: F401 (before TensorFlow, so that oneDNN is on)
