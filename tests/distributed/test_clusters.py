"""XLA compiles GPU-style steps in clusters, once, and reports the operations outside."""

import collections
import pathlib
import tempfile
import types

import pytest

from dtransformer.reports.clusters import ClusterReport
from dtransformer.trainers import Trainer
from harness.networks import make, make_loss
from harness.runs import Run
from harness.training import _data
from tests.distributed.parity_runs import LONG, RUNS
from tests.shared_runs import on_ranks, parametrize_runs
from tests.trainers.test_xla import count_compilations

STEPS, NETWORK = 5, "causal"
PRODUCTS = {"MatMul", "_MklMatMul", "BatchMatMulV2", "Einsum"}


@parametrize_runs([run for run in RUNS if run.endswith("+gpu")], LONG)
def test_matrix_products_are_in_clusters_and_collectives_are_not(run, rank_results):
    layout = Run.from_name(run).layout
    for rank in rank_results(run):
        assert rank["clusters"] > 1
        # TensorFlow forms no cluster for a single product, as in some backward passes of stages.
        if layout.stages == 1:
            assert not PRODUCTS & rank["outside"].keys()
        has_rank_collectives = any(
            op.startswith(("Horovod", "EagerPyFunc", "PyFunc")) for op in rank["outside"]
        )
        has_mesh_collectives = any(op.startswith("Collective") for op in rank["outside"])
        assert (
            has_mesh_collectives
            if layout.joins_ranks
            else has_rank_collectives or layout.stages > 1
        )


def _trained():
    """Train five steps and return the cluster report and XLA's compilations after the first step."""
    model, optimizer = make(NETWORK)
    model.build()
    trainer = Trainer(model)
    trainer.compile(optimizer, make_loss(NETWORK))
    data = _data(NETWORK, STEPS, model, seed=0)
    fit = lambda batches: trainer.fit(batches, verbose=0, shard=False)
    fit(data.take(1))
    with tempfile.TemporaryDirectory() as folder:
        recompilations = count_compilations(lambda: fit(data.skip(1)), pathlib.Path(folder))
    assert trainer.num_steps == STEPS
    return trainer._program.compiler.clusters, recompilations


@pytest.mark.long
@on_ranks("dp2@2x1+gpu")
def test_clusters_of_data_parallel_ranks_compile_once():
    report, recompilations = _trained()
    assert report.clusters > 1 and not recompilations, (report, recompilations)
    assert any("Horovod" in op for op in report.outside), report
    assert not PRODUCTS & report.outside.keys(), report


@pytest.mark.long
@on_ranks("mp2@2x1+rows+sp+gpu")
def test_clusters_of_a_mesh_of_ranks_compile_once():
    report, recompilations = _trained()
    assert report.clusters > 1 and not recompilations, (report, recompilations)
    assert report.outside["CollectiveReduceV2"] >= 4, report
    assert not PRODUCTS & report.outside.keys(), report


def test_report_counts_clusters_and_operations_outside():
    operations = {
        "_XlaCompile": 2,
        "_XlaRun": 2,
        "StatefulPartitionedCall": 3,
        "Const": 4,
        "NoOp": 1,
    }
    operations |= {"XlaLaunch": 1, "CollectiveReduceV2": 1000} | {f"Op{n}": 1 for n in range(9)}
    nodes = [types.SimpleNamespace(op=op) for op in collections.Counter(operations).elements()]
    report = ClusterReport.from_graphs(
        [types.SimpleNamespace(node=nodes[:9])] + [types.SimpleNamespace(node=nodes[9:])]
    )
    assert report.clusters == 3 and report.outside["function"] == 1
    assert str(report) == (
        "XLA compiles 3 clusters of a step. 1,010 operations stay outside: 1000 CollectiveReduceV2, "
        "1 Op0, 1 Op1, 1 Op2, 1 Op3, 1 Op4, 1 Op5, 1 Op6, …"
    )
