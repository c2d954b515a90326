"""Published measurements for checking the planner, with their sources.

All models use sequences of 2,048 tokens and a vocabulary of 51,200, on A100 GPUs with 80 GB.
"""

import dataclasses

from dtransformer.planner.models import get_model


@dataclasses.dataclass(frozen=True)
class Measured:
    """A measured training step.

    Args:
        model: Name of the model in `dtransformer.architectures`.
        tensor, stages, chunks, data: Parallel degrees.
        global_batch, micro_batch: Sequences per step and per micro-batch.
        seconds: Duration of the step.
        overlaps: Boolean, whether the gradient reduction overlaps with the backward pass.
        recompute: "full", or "attention" together with sequence parallelism.
    """

    model: str
    tensor: int
    stages: int
    chunks: int
    data: int
    global_batch: int
    micro_batch: int
    seconds: float
    overlaps: bool = False
    recompute: str = "full"


# Narayanan et al., 2021, arXiv 2104.04473, table 1. Micro-batches, chunks and overlap come from
# Megatron-LM's scripts. Columns: model, billions of parameters, devices, tensor, stages, chunks,
# data, batch, micro-batch, overlaps, TFLOP/s per device including recomputation.
_TABLE_1 = (
    ("gpt_1.7b", 1.7, 32, 1, 1, 1, 32, 512, 16, True, 137),
    ("gpt_3.6b", 3.6, 64, 2, 1, 1, 32, 512, 16, True, 138),
    ("gpt_7.5b", 7.5, 128, 4, 1, 1, 32, 512, 16, True, 142),
    ("gpt_18b", 18.4, 256, 8, 1, 1, 32, 1024, 8, True, 135),
    ("gpt_39b", 39.1, 512, 8, 2, 1, 32, 1536, 4, False, 138),
    ("gpt_76b", 76.1, 1024, 8, 4, 3, 32, 1792, 2, False, 140),
    ("gpt_145b", 145.6, 1536, 8, 8, 2, 24, 2304, 2, False, 148),
    ("gpt_310b", 310.1, 1920, 8, 16, 2, 15, 2160, 1, False, 155),
    ("gpt_530b", 529.6, 2520, 8, 35, 3, 9, 2520, 1, False, 163),
    ("gpt_1t", 1008.0, 3072, 8, 64, 1, 6, 3072, 1, False, 163),
)

# Same paper, table 2. Columns: scheme, model, devices, tensor × stages, batch, micro-batch, TFLOP/s
# per device.
_TABLE_2 = (
    ("ZeRO-3", "gpt_175b", 384, 1, 1536, 4, 144),
    ("ZeRO-3", "gpt_175b", 768, 1, 1536, 2, 88),
    ("ZeRO-3", "gpt_175b", 1536, 1, 1536, 1, 44),
    ("ZeRO-3", "gpt_530b", 640, 1, 2560, 4, 138),
    ("ZeRO-3", "gpt_530b", 1120, 1, 2240, 2, 98),
    ("ZeRO-3", "gpt_530b", 2240, 1, 2240, 1, 48),
    ("PTD", "gpt_175b", 384, 96, 1536, 1, 153),
    ("PTD", "gpt_175b", 768, 96, 1536, 1, 149),
    ("PTD", "gpt_175b", 1536, 96, 1536, 1, 141),
    ("PTD", "gpt_530b", 560, 280, 2240, 1, 171),
    ("PTD", "gpt_530b", 1120, 280, 2240, 1, 167),
    ("PTD", "gpt_530b", 2240, 280, 2240, 1, 159),
)

# Korthikanti et al., 2022, arXiv 2205.05198, table 5. Columns: model, tensor, stages, chunks,
# devices, batch, micro-batch, seconds with full recomputation, and seconds with attention
# recomputation and sequence parallelism.
_TABLE_5 = (
    ("gpt_22b", 8, 1, 1, 8, 4, 4, 1.42, 1.10),
    ("gpt_175b", 8, 8, 3, 64, 64, 1, 18.13, 13.75),
    ("gpt_530b", 8, 35, 3, 280, 280, 1, 49.05, 37.83),
    ("gpt_1t", 8, 64, 1, 512, 512, 1, 94.42, 71.49),
)

# The same, figure 1, GiB a device: states, and activations with nothing recomputed, with sequence
# parallelism, with attention recomputed, with both, with all recomputed.
FIGURE_1 = {
    "gpt_22b": (45.56, 59.25, 39.56, 29.25, 9.56, 4.50),
    "gpt_175b": (45.56, 66.84, 41.41, 37.78, 12.35, 5.81),
    "gpt_530b": (31.64, 114.02, 66.51, 70.59, 23.08, 10.86),
    "gpt_1t": (32.96, 131.25, 76.56, 81.25, 26.56, 12.50),
}

# Rajbhandari et al., 2020, arXiv 1910.02054, figure 1 and table 1: GB of model states per device,
# by billions of parameters and number of devices, for levels 1, 2 and 3.
ZERO_STATES = {
    7.5: {
        1: (120, 120, 120),
        4: (52.5, 41.3, 30),
        16: (35.6, 21.6, 7.5),
        64: (31.4, 16.6, 1.88),
        256: (30.4, 15.4, 0.47),
        1024: (30.1, 15.1, 0.12),
    },
    128: {
        1: (2048, 2048, 2048),
        4: (896, 704, 512),
        16: (608, 368, 128),
        64: (536, 284, 32),
        256: (518, 263, 8),
        1024: (513.5, 257.8, 2),
    },
    1000: {
        1: (16000, 16000, 16000),
        4: (7000, 5500, 4000),
        16: (4750, 2875, 1000),
        64: (4187.5, 2218.8, 250),
        256: (4046.9, 2054.7, 62.5),
        1024: (4011.7, 2013.7, 15.6),
    },
}

# VIA-Research/vTrain, data/ground_truth_multi.csv (MIT licence): layouts measured with
# Megatron-DeepSpeed. Keys: model, devices, batch. Columns: tensor, data, stages, micro-batch,
# milliseconds.
_LAYOUTS = {
    ("gpt_3.6b", 64, 512): (
        (1, 64, 1, 8, 3566.5), (1, 64, 1, 4, 3638.3), (2, 32, 1, 8, 3975.2), (1, 64, 1, 2, 3700.5),
        (2, 32, 1, 16, 3937.5), (2, 32, 1, 4, 4078.2), (2, 32, 1, 2, 4264.2), (4, 16, 1, 16, 4492.1),
        (4, 16, 1, 32, 4548.2), (4, 16, 1, 8, 4634.4), (4, 16, 1, 4, 4764), (1, 32, 2, 4, 4382.1),
        (1, 32, 2, 2, 4034.9), (4, 16, 1, 2, 6228.3), (1, 32, 2, 8, 5045.6), (8, 8, 1, 64, 9838.9),
        (8, 8, 1, 32, 4972.3), (8, 8, 1, 16, 5017.8), (8, 8, 1, 8, 5178), (8, 8, 1, 4, 5618),
        (8, 8, 1, 2, 8880.9), (16, 4, 1, 32, 10580.6), (16, 4, 1, 16, 10719.3), (16, 4, 1, 8, 10894),
        (16, 4, 1, 4, 11960.1), (16, 4, 1, 2, 13472.2),
    ),
    ("gpt_18b", 256, 1024): (
        (8, 32, 1, 8, 9603.6), (8, 32, 1, 16, 10506.6), (8, 32, 1, 4, 9927.6), (8, 32, 1, 2, 10453.3),
        (4, 32, 2, 8, 10856.3), (4, 32, 2, 4, 10950.4), (4, 32, 2, 2, 10031.6), (2, 32, 4, 4, 10825),
        (1, 32, 8, 4, 12379), (8, 16, 2, 2, 10434.8), (8, 8, 4, 2, 10926.4), (8, 4, 8, 8, 11026.1),
        (2, 16, 8, 8, 13157.5), (16, 16, 1, 2, 20414.8), (8, 4, 8, 32, 16241.4),
    ),
    ("gpt_39b", 512, 1536): (
        (2, 32, 8, 2, 21890.4), (4, 32, 4, 2, 13875.5), (2, 16, 16, 2, 23747.9), (4, 32, 4, 3, 16185.5),
        (4, 32, 4, 4, 15625.6), (4, 16, 8, 2, 16070.6), (2, 32, 8, 3, 19067.2), (4, 16, 8, 3, 17606.1),
        (4, 8, 16, 2, 14529.6), (2, 16, 16, 3, 26188.8), (4, 16, 8, 4, 17413.6), (4, 32, 4, 6, 18532.1),
        (8, 32, 2, 6, 14915.5), (8, 32, 2, 8, 15212.8), (8, 32, 2, 4, 14757.3), (8, 32, 2, 12, 17126.8),
        (8, 32, 2, 3, 14850.4), (4, 8, 16, 3, 15023.9), (8, 32, 2, 2, 14614), (4, 8, 16, 4, 15585.5),
        (8, 16, 4, 2, 14713.4), (4, 16, 8, 6, 16087), (8, 16, 4, 3, 14833.8), (8, 16, 4, 4, 14750.7),
        (8, 16, 4, 6, 15249.4), (8, 8, 8, 2, 15001.9), (8, 16, 4, 8, 15814.5), (8, 8, 8, 3, 15270.7),
        (8, 8, 8, 4, 14967.1), (4, 8, 16, 6, 20044.1), (8, 8, 8, 6, 15775.3), (8, 16, 4, 12, 17182.4),
        (1, 32, 16, 3, 19991), (8, 4, 16, 2, 15639.4), (2, 32, 8, 6, 23062.9), (8, 4, 16, 3, 16360.8),
        (8, 8, 8, 8, 16413.4), (8, 4, 16, 4, 15944.5), (8, 4, 16, 6, 16232.8), (2, 16, 16, 6, 27228.4),
        (8, 8, 8, 12, 17999.5), (4, 16, 8, 12, 20614.8), (8, 4, 16, 8, 16877.1), (8, 4, 16, 12, 18568.3),
        (4, 8, 16, 12, 27810.3), (8, 8, 8, 24, 23171.1), (8, 4, 16, 24, 24169.9),
    ),
    ("gpt_175b", 512, 1536): (
        (4, 8, 16, 2, 54255.9), (4, 8, 16, 3, 55236), (4, 4, 32, 2, 53909.6), (4, 4, 32, 2, 53937.9),
        (4, 4, 32, 3, 56297.2), (2, 8, 32, 2, 57411.2), (4, 8, 16, 4, 57720), (8, 8, 8, 2, 55109.6),
        (8, 8, 8, 3, 56176.5), (8, 4, 16, 2, 56315.8), (4, 4, 32, 4, 59333.2), (8, 8, 8, 4, 58240.3),
        (8, 4, 16, 3, 55677.5), (8, 4, 16, 4, 57504.3), (8, 2, 32, 2, 58555.4), (8, 2, 32, 3, 57324.4),
        (2, 8, 32, 3, 64296.3), (8, 4, 16, 6, 60519.2), (4, 4, 32, 6, 66632.5), (8, 2, 32, 4, 59147.5),
        (8, 2, 32, 6, 62636.8),
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Table1Row:
    """Row of table 1.

    Args:
        step: `Measured` step. Its seconds follow from the row's TFLOP/s.
        billions: Printed number of parameters in billions.
        devices: Number of devices.
        tflops: Printed TFLOP/s per device.
    """

    step: Measured
    billions: float
    devices: int
    tflops: float


def table_1() -> list[Table1Row]:
    """Return the rows of table 1 for all ten models."""
    rows = []
    for model, billions, devices, t, p, v, d, batch, b, overlaps, tflops in _TABLE_1:
        seconds = count_step_flops(model, batch) / (devices * tflops * 1e12)
        step = Measured(model, t, p, v, d, batch, b, seconds, overlaps)
        rows.append(Table1Row(step, billions, devices, tflops))
    return rows


def count_step_flops(model: str, batch: int) -> float:
    """Return the FLOPs of a step with full recomputation, by the formula in section 5.1."""
    shape = get_model(model)
    s, h = 2048, shape.config.hidden_size
    layers, entries = shape.num_blocks, shape.config.vocab_size
    return 96 * batch * s * layers * h**2 * (1 + s / (6 * h) + entries / (16 * layers * h))


def table_2(scheme: str) -> list[tuple[Measured, float]]:
    """Return the steps of table 2 and their TFLOP/s per device.

    Args:
        scheme: "PTD" or "ZeRO-3".
    """
    steps = []
    for name, model, devices, mp, batch, b, tflops in _TABLE_2:
        if name == scheme:
            tensor = 8 if mp > 1 else 1
            stages = max(mp // 8, 1)
            seconds = count_step_flops(model, batch) / (devices * tflops * 1e12)
            # Table 2 does not state the chunks. Table 1 interleaves these pipelines.
            chunks = {35: 3, 12: 2}.get(stages, 1)
            step = Measured(model, tensor, stages, chunks, devices // mp, batch, b, seconds)
            steps.append((step, tflops))
    return steps


def table_5(recompute: str) -> list[Measured]:
    """Return the steps of table 5 with "full" or "attention" recomputation."""
    steps = []
    for model, t, p, v, devices, batch, b, full, attention in _TABLE_5:
        seconds = full if recompute == "full" else attention
        data = devices // (t * p)
        steps.append(Measured(model, t, p, v, data, batch, b, seconds, recompute=recompute))
    return steps


def make_layouts(model: str) -> list[Measured]:
    """Return the measured layouts of a model in `LAYOUT_MODELS`."""
    ((batch, rows),) = [(key[2], rows) for key, rows in _LAYOUTS.items() if key[0] == model]
    return [Measured(model, t, p, 1, d, batch, b, ms / 1000) for t, d, p, b, ms in rows]


LAYOUT_MODELS = tuple(model for model, _, _ in _LAYOUTS)
# The constants are fitted to these models and to table 1, and tested on the other models.
FITTED_MODELS = ("gpt_3.6b", "gpt_18b")
HELD_OUT_MODELS = tuple(model for model in LAYOUT_MODELS if model not in FITTED_MODELS)
