"""Planner: estimate the cost of parallel layouts and recommend the best one.

`plan` searches all layouts and `cost` evaluates a single one. Both use NumPy only, without
devices or TensorFlow.

Example: four nodes of eight H100, and a Llama of 13 B.

>>> model, cluster = get_model("llama2_13b"), Cluster(get_device("h100"), 32)
>>> result = plan(model, cluster, Job(global_batch=256))
>>> result.fits, result.best.config.pipeline_stage * result.best.config.model_parallel <= 8
(True, True)
>>> unsharded = cost(model, cluster, Job(256), TransformerOpParallelConfig(micro_batch_num=8))
>>> unsharded.fits, unsharded.missing_bytes > 10**11, unsharded.change != ""
(False, True, True)
"""

from dtransformer.parallel.config.config import TransformerOpParallelConfig
from dtransformer.planner.automatic import auto_config
from dtransformer.planner.clusters import DEVICES, Cluster, Constants, Device, Link, get_device
from dtransformer.planner.cost import Cost
from dtransformer.planner.job import Job
from dtransformer.planner.models import from_network, get_model
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
    "auto_config",
    "cost",
    "from_network",
    "get_device",
    "get_model",
    "plan",
]
