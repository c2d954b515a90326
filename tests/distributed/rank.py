"""Runs jobs on this rank and writes their results: the program that tests launch.

horovodrun -np 2 python -m tests.distributed.rank FOLDER [JOB ...]
"""

import json
import pathlib
import sys

import dtransformer
from dtransformer.parallel import job
from tests.distributed.jobs import JOBS


def main(folder, *names):
    dtransformer.init()
    results = {name: JOBS[name]() for name in names or JOBS}
    path = pathlib.Path(folder) / f"rank{job.rank()}.json"
    path.write_text(json.dumps(results), encoding="utf-8")
    job.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
