"""Planner: the cost of layouts, and which to take: pure NumPy, without devices and TensorFlow.

`plan` searches, `cost` answers for one layout.

Example: four nodes of eight H100, and a Llama of 13 B.

>>> model, cluster = named("llama2_13b"), Cluster(device_named("h100"), 32)
>>> found = plan(model, cluster, Job(global_batch=256))
>>> found.fits, found.best.config.pipeline_stage * found.best.config.model_parallel <= 8
(True, True)
>>> whole = cost(model, cluster, Job(256), TransformerOpParallelConfig(micro_batch_num=8))
>>> whole.fits, whole.missing_bytes > 10**11, whole.change != ""
(False, True, True)
"""

from dtransformer.parallel.config.config import TransformerOpParallelConfig
from dtransformer.planner.clusters import DEVICES, Cluster, Constants, Device, Link, device_named
from dtransformer.planner.cost import Cost
from dtransformer.planner.job import Job
from dtransformer.planner.models import from_network, named
from dtransformer.planner.search import Plan, cost, plan
from dtransformer.planner.shape import ModelShape

__all__ = [
    "DEVICES",
    "Cluster",
    "Constants",
    "Cost",
    "Device",
    "Job",
    "Link",
    "ModelShape",
    "Plan",
    "TransformerOpParallelConfig",
    "cost",
    "device_named",
    "from_network",
    "named",
    "plan",
]
