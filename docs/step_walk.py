"""Files of this package that a training step passes, counted from real calls; prints JSON.

    python docs/step_walk.py [one_device | mesh | pipeline]

The first step of a small network is traced under `sys.setprofile`, in one process: a mesh of two
logical devices, a pipeline of one stage with two model chunks. A file counts if one of its
functions runs inside `StepRunner.train`. Calls below the network's layers, and their gradients, do
not count, because the network belongs to the user. Lines are lines of code.
"""

import argparse
import json
import pathlib
import sys
import threading

PACKAGE = pathlib.Path(__file__).parents[1] / "dtransformer"
sys.path.insert(0, str(PACKAGE.parent))  # harness/ is not installed

from harness.code_size import count_lines  # noqa: E402

LAYOUTS = {
    "one_device": ({}, 1),
    "mesh": ({"model_parallel": 2}, 2),
    "pipeline": (
        {
            "pipeline_stage": 1,
            "pipeline_schedule": "interleaved",
            "pipeline_chunks": 2,
            "micro_batch_num": 2,
        },
        1,
    ),
}
NETWORK = tuple(f"{PACKAGE}/{folder}/" for folder in ("layers", "models"))
# TensorFlow calls the gradients of the layers' operations in these functions.
BACKWARD = "GradientTape.gradient", "_GradientsHelper"


def is_of_network(code):
    """Return whether a code object is a method of a layer, or the backward pass."""
    return code.co_filename.startswith(NETWORK) or code.co_qualname in BACKWARD


def walk(layout):
    """Return the files whose functions run in the first step of a layout, sorted."""
    import keras
    import numpy as np

    import dtransformer
    from dtransformer.layers import CrossEntropyLoss
    from dtransformer.models import CausalLM
    from dtransformer.trainers.step_runner import StepRunner

    fields, devices = LAYOUTS[layout]
    dtransformer.init(dtransformer.TransformerOpParallelConfig(**fields), local_devices=devices)
    network = CausalLM(50, hidden_size=16, num_heads=2, num_layers=2, dropout_rate=0.0)
    trainer = dtransformer.Trainer(network)
    trainer.compile(keras.optimizers.AdamW(1e-3), CrossEntropyLoss(ignore_id=0))
    ids = np.random.default_rng(0).integers(4, 50, (8, 7))
    data = ids[:, :-1], ids[:, 1:]
    passed = set()
    inside = []  # Frames of the network's outermost calls, at most one per thread.

    def note(frame, event, _):
        name = frame.f_code.co_filename
        if event == "call":
            if not inside and is_of_network(frame.f_code):
                inside.append(frame)
            elif not inside:
                passed.add(name)
        elif event == "return" and inside and frame is inside[-1]:
            inside.pop()

    train = StepRunner.train

    def noted(*args):
        threading.setprofile(note)
        sys.setprofile(note)
        try:
            return train(*args)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    StepRunner.train = noted
    trainer.fit(*data, batch_size=8, epochs=1, verbose=0)
    dtransformer.shutdown()
    paths = [pathlib.Path(name) for name in passed]
    return sorted(path.relative_to(PACKAGE) for path in paths if path.is_relative_to(PACKAGE))


def main():
    """Print the walk of the layout that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("layout", choices=LAYOUTS, nargs="?", default="one_device")
    layout = parser.parse_args().layout
    files = walk(layout)
    lines = {str(file): count_lines((PACKAGE / file).read_text("utf-8")) for file in files}
    print(json.dumps({"layout": layout, "files": len(lines), "lines": sum(lines.values())}))
    print(json.dumps(lines, indent=1))


if __name__ == "__main__":
    main()
