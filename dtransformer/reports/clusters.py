"""Report of XLA's clusters in a training step and of the operations outside them."""

import collections
import dataclasses
from collections.abc import Iterable, Mapping

# Operations that compute nothing, or that belong to the call of a cluster.
_IGNORED = {
    "_Arg", "_Retval", "_DeviceArg", "_DeviceRetval", "_Send", "_Recv", "_HostSend", "_HostRecv",
    "Const", "NoOp", "Identity", "IdentityN", "Switch", "Merge", "_XlaRun", "_XlaMerge",
}  # fmt: skip
# An optimized graph has one of these operations for each cluster.
_CLUSTERS = "_XlaCompile", "XlaLaunch"
_CALLS = "StatefulPartitionedCall", "PartitionedCall"
_MAX_NAMED = 8  # Number of operation types in the report's text.


@dataclasses.dataclass(frozen=True)
class ClusterReport:
    """XLA's clusters in the functions of a step, on all devices of this rank.

    `str(report)` is one line.

    Args:
        clusters: Number of clusters.
        outside: Dict from operation types outside clusters to their counts. "function" counts
            calls of functions that are compiled separately.
    """

    clusters: int
    outside: Mapping

    @classmethod
    def from_graphs(cls, graphs: Iterable) -> "ClusterReport":
        """Return the report of optimized `GraphDef`s."""
        counts = collections.Counter(node.op for graph in graphs for node in graph.node)
        clusters = sum(counts[op] for op in _CLUSTERS)
        # Each _XlaCompile has a fallback call that runs the cluster's operations uncompiled.
        calls = sum(counts.pop(op, 0) for op in _CALLS) - counts["_XlaCompile"]
        outside = {op: n for op, n in counts.items() if op not in (*_IGNORED, *_CLUSTERS)}
        return cls(clusters, outside | ({"function": calls} if calls > 0 else {}))

    def __str__(self):
        num_outside = sum(self.outside.values())
        sorted_counts = sorted(self.outside.items(), key=lambda item: (-item[1], item[0]))
        descriptions = [f"{n} {op}" for op, n in sorted_counts[:_MAX_NAMED]]
        if len(sorted_counts) > _MAX_NAMED:
            descriptions.append("…")
        return (
            f"XLA compiles {self.clusters} clusters of a step. {num_outside:,} operations stay outside: "
            f"{', '.join(descriptions)}"
        )
