"""Reports of what is so, printed: sharding, communication, memory, throughput."""

from dtransformer.reports.curves import draw_losses

__all__ = ["draw_losses"]
