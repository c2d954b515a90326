"""Report of XLA's clusters in a training step: how many there are, and which operations stay outside."""

import collections
import dataclasses
from collections.abc import Iterable, Mapping

# What carries a graph and computes nothing, or belongs to a cluster's own call.
_CARRIERS = {
    *("_Arg", "_Retval", "_DeviceArg", "_DeviceRetval", "_Send", "_Recv", "_HostSend", "_HostRecv"),
    *("Const", "NoOp", "Identity", "IdentityN", "Switch", "Merge", "_XlaRun", "_XlaMerge"),
}
# Each cluster of a graph that TensorFlow has optimized has one of these.
_CLUSTERS = "_XlaCompile", "XlaLaunch"
_CALLS = "StatefulPartitionedCall", "PartitionedCall"
_NAMED = 8  # of the operations that stay outside, in the report's text


@dataclasses.dataclass(frozen=True)
class ClusterReport:
    """XLA's clusters of the functions of a step, on all devices of this rank. Its `str` is a line.

    Args:
        clusters: number of clusters.
        outside: dict of the operations that are in none, and their numbers; "function" for calls of
            functions that are compiled apart.
    """

    clusters: int
    outside: Mapping

    @classmethod
    def of(cls, graphs: Iterable) -> "ClusterReport":
        """Return the report of `GraphDef`s that TensorFlow has optimized to run them."""
        counts = collections.Counter(node.op for graph in graphs for node in graph.node)
        clusters = sum(counts[op] for op in _CLUSTERS)
        # A cluster that may be compiled later has a call of its operations one by one.
        calls = sum(counts.pop(op, 0) for op in _CALLS) - counts["_XlaCompile"]
        outside = {op: n for op, n in counts.items() if op not in (*_CARRIERS, *_CLUSTERS)}
        return cls(clusters, outside | ({"function": calls} if calls > 0 else {}))

    def __str__(self):
        number = sum(self.outside.values())
        most = sorted(self.outside.items(), key=lambda item: (-item[1], item[0]))
        named = [f"{n} {op}" for op, n in most[:_NAMED]] + ["…"] * (len(most) > _NAMED)
        return (
            f"XLA compiles {self.clusters} clusters of a step; {number:,} operations stay outside: "
            f"{', '.join(named)}"
        )
