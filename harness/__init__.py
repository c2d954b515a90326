"""Shared code of tests and benchmarks: launching ranks, layouts and small networks.

The folder is not part of the installed package. From low to high level:

    launch.py      run a program on several ranks, with a timeout
    printed.py     read the JSON that such programs print
    layouts.py     named parallel layouts
    networks.py    named small networks and their optimizers
    batches.py     training data for them
    training.py    train a network; evaluate, predict, generate and save with it
    tasks.py       other small trainings, one per option
    stateful.py    networks with layer states, metrics, added losses and masks
    runs.py        a task with a layout, and the files with its results
    rank.py        the program that executes runs on a rank
    quick.py       settings that shorten compilation in tests
    compare.py     differences from a single process, within tolerances.py
    measure.py     a larger network and the memory of a step, for benchmarks
    code_size.py   size of the code in tokens, for the budget in tests/test_house.py
    prose.py       search for stilted English, for the ceilings in tests/test_prose.py
    published_tables/   published figures next to the planner's
"""

import dtransformer  # noqa: F401 (before TensorFlow, so that oneDNN is on)
