"""What of a device's figures training reaches: each constant with its unit and its source."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Constants:
    """What of a device's and its links' figures training reaches.

    A product [M, K] × [K, N] takes 2·M·K·N / (peak · product_share), times (1 + half_rows / M),
    (1 + half_features / K) and (1 + half_features / N).

    Args:
        product_share: share of the peak that large products reach.
        half_rows: rows M at which a product reaches half of that.
        half_features: features K or N at which a product reaches half of that.
        memory_share: share of the memory's bandwidth that what is no product reaches.
        pass_overhead_us: microseconds of a block's pass that no figure explains: starts of kernels.
        inside_share: share of the links' bandwidth inside of a node that a ring reaches.
        between_share: share of the network's bandwidth that a ring reaches.
        hop_us: microseconds of a step of a ring, whatever it sends.
        source: where they come from.
    """

    product_share: float
    half_rows: float
    half_features: float
    memory_share: float
    pass_overhead_us: float
    inside_share: float
    between_share: float
    hop_us: float
    source: str = ""


# benchmarks/fit_planner.py prints those that it fits; the others are set, for these reasons.
A100 = Constants(
    product_share=0.876,  # fitted
    half_rows=349,  # fitted
    half_features=191,  # fitted
    memory_share=0.9,  # set: copies of large tensors reach 1.8 of 2.04 TB/s
    pass_overhead_us=12.1,  # fitted
    inside_share=0.7,  # set: NCCL's rings reach 210 of 300 GB/s
    between_share=0.509,  # fitted
    hop_us=8.34,  # fitted
    source="fitted on Narayanan et al., 2021, table 1, and on the measured layouts of the 3.6 B and "
    "18.4 B models; those of the 39.1 B and 175 B models were held out",
)
# Those of the A100 that steps which were measured on it have in them.
CHECKED = (
    *("product_share", "half_rows", "half_features", "pass_overhead_us"),
    *("between_share", "hop_us"),
)
