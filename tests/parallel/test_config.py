"""Configs validate every field, have views and defaults, and one config is global."""

import dataclasses

import numpy as np
import pytest

import dtransformer
from dtransformer import (
    EmbeddingOpParallelConfig,
    MoEConfig,
    MoEParallelConfig,
    OpParallelConfig,
    TransformerOpParallelConfig,
    TransformerRecomputeConfig,
    get_parallel_config,
    parallel_config,
    set_parallel_config,
)

DEFAULTS = {
    OpParallelConfig: {"data_parallel": 1, "model_parallel": 1},
    EmbeddingOpParallelConfig: {"data_parallel": 1, "model_parallel": 1, "vocab_emb_dp": True},
    MoEParallelConfig: {"data_parallel": 1, "model_parallel": 1, "expert_parallel": 1},
    MoEConfig: {
        "expert_num": 1,
        "capacity_factor": 1.1,
        "aux_loss_factor": 0.05,
        "num_experts_chosen": 1,
        "expert_group_size": None,
        "z_loss_factor": 0.0,
        "router_jitter": 0.0,
        "router_type": "softmax",
        "shared_experts": 0,
        "dropless": False,
        "routing_groups": 1,
        "routing_groups_chosen": 1,
        "group_score": "top2",
        "normalizes_gates": True,
        "gate_scale": 1.0,
        "ffn_hidden_size": None,
        "router_bias": False,
    },
    TransformerRecomputeConfig: {
        "recompute": False,
        "mp_comm_recompute": True,
        "parallel_optimizer_comm_recompute": False,
        "recompute_slice_activation": False,
        "select": (),
    },
    TransformerOpParallelConfig: {
        "data_parallel": None,
        "model_parallel": 1,
        "pipeline_stage": 1,
        "pipeline_schedule": "1f1b",
        "pipeline_chunks": 1,
        "context_parallel": 1,
        "context_parallel_mode": "auto",
        "ulysses_shards": None,
        "expert_parallel": 1,
        "micro_batch_num": 1,
        "optimizer_shard": False,
        "optimizer_shard_partition": "flat",
        "parallel_optimizer_threshold": 64,
        "parallel_optimizer_exclude": (),
        "gradient_accumulation_shard": False,
        "gradient_dtype": "float32",
        "optimizer_state_dtype": "float32",
        "gradient_aggregation_group": 4,
        "recompute": False,
        "vocab_emb_dp": True,
        "sequence_parallel": False,
        "parallel_rules": None,
        "layout_map": None,
    },
}

# Kind of field -> (valid values, invalid values).
KINDS = {
    "count": ([1, 2, 1024], [1.0, "2", None, True, False, [1], 0, -1]),
    "count or None": ([None, 1, 8], [2.0, "2", True, False, (1,), 0, -3]),
    "flag": ([True, False], [0, 1, None, "yes", 1.0]),
    "positive": ([1, 1.5, 1e-3], [None, "1", True, 0, 0.0, -1.1, float("inf"), float("nan")]),
    "non-negative": ([0, 0.0, 2.5], [None, "1", False, -0.1, float("inf"), float("nan")]),
    "fraction": ([0, 0.0, 0.5], [None, "1", False, -0.1, 1, float("inf"), float("nan")]),
    "count or 0": ([0, 1, 8], [1.0, "2", None, True, False, -1]),
    "router": (["softmax", "sigmoid"], [None, 1, True, "tanh", ""]),
    "score": (["top2", "max"], [None, 1, True, "min", ""]),
    "level": ([False, True, 0, 1, 2, 3], [None, 1.0, "1", [1], -1, 4]),
    "recompute": ([True, False, TransformerRecomputeConfig()], [None, 0, 1, "all", {}]),
    "rules": (
        [None, {}, {"mlp": None}, {"mlp": "model", "own_name": "data"}],
        ["mlp", ("mlp", None), 1, {"mlp": "stage"}, {"mlp": 0}, {1: "model"}],
    ),
    "layouts": (
        [None, {}, {"kernel$": (None, "model"), "a.*b": ("data",)}],
        ["kernel", 1, {"(": ("model",)}, {"kernel": "model"}, {"a": ("context",)}, {1: ("model",)}],
    ),
    "patterns": (
        [(), ("bias",), ("norm/", "^head")],
        ["bias", None, (1,), {"norm"}, True, ("(",), ("bias", "*")],
    ),
    "type": (["float32", "float16", "bfloat16"], [None, 16, True, "float64", "", "half"]),
    "state type": (["float32", "bfloat16"], [None, 16, True, "float16", "", "half"]),
    "partition": (["flat", "whole"], [None, 1, True, "flatten", ""]),
    "mode": (
        ["auto", "ulysses", "all_gather", "ring", "ulysses_ring"],
        [None, 1, True, "Ring", ""],
    ),
    "schedule": (["1f1b", "gpipe"], [None, 1, True, "zigzag", ""]),
    "parts": (
        [(), ("attention",), ("feed_forward", "norm")],
        ["attention", None, 1, {"norm"}, True, ("attention", "head"), ("",), (1,)],
    ),
}
KIND_BY_FIELD = {
    "vocab_emb_dp": "flag",
    "gradient_accumulation_shard": "flag",
    "parallel_optimizer_threshold": "non-negative",
    "parallel_optimizer_exclude": "patterns",
    "gradient_dtype": "type",
    "optimizer_state_dtype": "state type",
    "context_parallel_mode": "mode",
    "ulysses_shards": "count or None",
    "pipeline_schedule": "schedule",
    "sequence_parallel": "flag",
    "mp_comm_recompute": "flag",
    "parallel_optimizer_comm_recompute": "flag",
    "recompute_slice_activation": "flag",
    "capacity_factor": "positive",
    "aux_loss_factor": "non-negative",
    "expert_group_size": "count or None",
    "z_loss_factor": "non-negative",
    "router_jitter": "fraction",
    "router_type": "router",
    "shared_experts": "count or 0",
    "dropless": "flag",
    "group_score": "score",
    "normalizes_gates": "flag",
    "gate_scale": "positive",
    "router_bias": "flag",
    "ffn_hidden_size": "count or None",
    "optimizer_shard": "level",
    "optimizer_shard_partition": "partition",
    "select": "parts",
    "parallel_rules": "rules",
    "layout_map": "layouts",
}


def field_kind(cls, name):
    if cls is TransformerOpParallelConfig and name == "data_parallel":
        return "count or None"
    if name == "recompute":
        return "flag" if cls is TransformerRecomputeConfig else "recompute"
    return KIND_BY_FIELD.get(name, "count")


FIELDS = [(cls, name) for cls, fields in DEFAULTS.items() for name in fields]
each_config = pytest.mark.parametrize("cls", DEFAULTS, ids=lambda cls: cls.__name__)
each_field = pytest.mark.parametrize(
    "cls, name", FIELDS, ids=[f"{cls.__name__}.{name}" for cls, name in FIELDS]
)


@each_config
def test_configs_have_the_documented_defaults(cls):
    config = cls()
    assert dataclasses.asdict(config) == DEFAULTS[cls]
    for name, default in DEFAULTS[cls].items():
        assert type(getattr(config, name)) is type(default), name


@each_field
def test_fields_accept_valid_values(cls, name):
    for value in KINDS[field_kind(cls, name)][0]:
        config = cls(**{name: value})
        assert getattr(config, name) == value and type(getattr(config, name)) is type(value)
        config = cls()
        setattr(config, name, value)
        assert getattr(config, name) == value


@each_field
def test_fields_reject_invalid_values_and_keep_the_old_value(cls, name):
    allowed, refused = KINDS[field_kind(cls, name)]
    for value in refused:
        with pytest.raises(ValueError, match=name):
            cls(**{name: value})
        for old in (allowed[0], allowed[-1]):
            config = cls(**{name: old})
            with pytest.raises(ValueError, match=name) as caught:
                setattr(config, name, value)
            assert str(value) in str(caught.value), "the message must contain the value"
            assert getattr(config, name) == old


@pytest.mark.parametrize(
    "cls, field, value, allowed",
    [
        (TransformerOpParallelConfig, "model_parallel", 0, "greater than or equal to 1"),
        (TransformerOpParallelConfig, "optimizer_shard", 4, "less than or equal to 3"),
        (
            TransformerOpParallelConfig,
            "optimizer_shard",
            "no",
            "a valid boolean or .* a valid integer",
        ),
        (TransformerOpParallelConfig, "recompute", 1, "an instance of TransformerRecomputeConfig"),
        (TransformerOpParallelConfig, "vocab_emb_dp", 1, "a valid boolean"),
        (TransformerRecomputeConfig, "select", ("head",), "'attention', 'feed_forward' or 'norm'"),
        (MoEConfig, "capacity_factor", 0, "greater than 0"),
    ],
)
def test_messages_state_the_allowed_values(cls, field, value, allowed):
    with pytest.raises(ValueError, match=allowed):
        cls(**{field: value})


def test_numpy_numbers_become_python_numbers():
    config = MoEConfig(capacity_factor=np.float32(1.5))
    assert type(config.capacity_factor) is float and config.capacity_factor == 1.5
    assert (
        type(dtransformer.TransformerOpParallelConfig(data_parallel=np.int64(2)).data_parallel)
        is int
    )


def test_lists_become_tuples():
    """A mutable list would let a config change without validation."""
    parts = ["attention"]
    config = TransformerRecomputeConfig(select=parts)
    parts.append("everything")
    assert config.select == ("attention",)


@pytest.mark.parametrize(
    "typo, nearest",
    [
        ("data_paralel", "data_parallel"),
        ("model_parallell", "model_parallel"),
        ("micro_batches", "micro_batch_num"),
        ("optimiser_shard", "optimizer_shard"),
    ],
)
def test_unknown_field_suggests_the_nearest_name(typo, nearest):
    config = TransformerOpParallelConfig()
    with pytest.raises(AttributeError, match=f"{typo}.*{nearest}"):
        setattr(config, typo, 2)
    assert not hasattr(config, typo)
    with pytest.raises(TypeError, match=typo):
        TransformerOpParallelConfig(**{typo: 2})


def test_unknown_field_without_a_similar_name_lists_all():
    with pytest.raises(AttributeError, match="data_parallel, model_parallel"):
        OpParallelConfig().zzz = 1


@each_config
def test_configs_compare_by_value(cls):
    assert cls() == cls()
    name, value = next(
        (name, value)
        for name, default in DEFAULTS[cls].items()
        for value in KINDS[field_kind(cls, name)][0]
        if value != default
    )
    changed = dataclasses.replace(cls(), **{name: value})
    assert changed != cls() and changed == cls(**{name: value})
    with pytest.raises(ValueError, match=name):
        dataclasses.replace(cls(), **{name: "wrong"})


def test_defaults_are_not_shared_between_configs():
    first, second = TransformerOpParallelConfig(), TransformerOpParallelConfig()
    first.model_parallel = 4
    first.recompute = TransformerRecomputeConfig(recompute=True)
    assert second == TransformerOpParallelConfig()
    OpParallelConfig().model_parallel = 2
    assert OpParallelConfig() == OpParallelConfig(1, 1)


def test_views_follow_the_config():
    config = TransformerOpParallelConfig(
        data_parallel=2, model_parallel=4, expert_parallel=2, vocab_emb_dp=False
    )
    assert config.dp_mp_config == OpParallelConfig(2, 4)
    assert config.embedding_dp_mp_config == EmbeddingOpParallelConfig(2, 4, False)
    assert config.moe_parallel_config == MoEParallelConfig(2, 4, 2)
    assert EmbeddingOpParallelConfig(2, 4, False).dp_mp_config == OpParallelConfig(2, 4)
    config.model_parallel = 8
    assert config.dp_mp_config == OpParallelConfig(2, 8), "a view follows the config"
    config.dp_mp_config.model_parallel = 1
    assert config.model_parallel == 8, "a config does not follow its views"


@pytest.mark.parametrize("view", ["dp_mp_config", "embedding_dp_mp_config", "moe_parallel_config"])
def test_views_need_data_parallel(view):
    with pytest.raises(ValueError, match="data_parallel.*dtransformer.init"):
        getattr(TransformerOpParallelConfig(model_parallel=2), view)


@pytest.mark.parametrize(
    "fields, num_ranks, data_parallel",
    [
        ({}, 1, 1),
        ({}, 6, 6),
        ({"model_parallel": 4}, 8, 2),
        ({"model_parallel": 2, "pipeline_stage": 3}, 6, 1),
        ({"model_parallel": 2, "pipeline_stage": 2, "context_parallel": 2}, 24, 3),
        ({"data_parallel": 3, "model_parallel": 2}, 6, 3),
        ({"data_parallel": 1}, 1, 1),
        ({"expert_parallel": 4}, 2, 2),
    ],
)
def test_resolve_sets_data_parallel(fields, num_ranks, data_parallel):
    config = TransformerOpParallelConfig(**fields)
    before = dataclasses.replace(config)
    resolved = config.resolve(num_ranks)
    assert resolved == TransformerOpParallelConfig(**{**fields, "data_parallel": data_parallel})
    assert config == before, "resolve must not change the config"
    assert resolved.resolve(num_ranks) == resolved


@pytest.mark.parametrize(
    "fields, num_ranks, needed",
    [
        ({"data_parallel": 2}, 1, 2),
        ({"data_parallel": 1}, 7, 1),
        ({"model_parallel": 4}, 6, 4),
        ({"model_parallel": 4}, 1, 4),
        ({"pipeline_stage": 3, "model_parallel": 2}, 5, 6),
        ({"data_parallel": 3, "model_parallel": 5, "pipeline_stage": 2}, 8, 30),
        ({"data_parallel": 3, "context_parallel": 5}, 8, 15),
    ],
)
def test_resolve_rejects_a_layout_that_does_not_fit_the_ranks(fields, num_ranks, needed):
    with pytest.raises(ValueError) as caught:
        TransformerOpParallelConfig(**fields).resolve(num_ranks)
    message = str(caught.value)
    for name, value in fields.items():
        assert f"{name}={value}" in message
    assert f"needs {needed} ranks" in message or f"a multiple of {needed} ranks" in message
    assert f"has {num_ranks}" in message and f"-np {needed}" in message
    assert "\n" not in message


def test_set_and_get_parallel_config():
    config = TransformerOpParallelConfig(model_parallel=4)
    set_parallel_config(config)
    assert get_parallel_config() is config


@pytest.mark.parametrize("value", [None, {}, OpParallelConfig(), TransformerOpParallelConfig])
def test_set_parallel_config_rejects_other_types(value):
    before = get_parallel_config()
    with pytest.raises(TypeError, match="TransformerOpParallelConfig"):
        set_parallel_config(value)
    assert get_parallel_config() is before


def test_scopes_nest_and_restore_the_config():
    outer = get_parallel_config()
    with parallel_config(model_parallel=2, vocab_emb_dp=False) as middle:
        assert get_parallel_config() == middle
        assert middle == TransformerOpParallelConfig(model_parallel=2, vocab_emb_dp=False)
        with parallel_config(pipeline_stage=3) as inner:
            assert inner == dataclasses.replace(middle, pipeline_stage=3)
        config = TransformerOpParallelConfig(data_parallel=5)
        with parallel_config(config, micro_batch_num=7) as inner:
            assert inner == TransformerOpParallelConfig(data_parallel=5, micro_batch_num=7)
            assert config.micro_batch_num == 1, "the scope must not change the given config"
        assert get_parallel_config() is middle
    assert get_parallel_config() is outer


def test_scope_restores_the_config_after_an_exception():
    outer = get_parallel_config()
    with pytest.raises(KeyError), parallel_config(model_parallel=2):
        raise KeyError
    assert get_parallel_config() is outer


@pytest.mark.parametrize(
    "fields, error", [({"model_parallel": 0}, ValueError), ({"model_paralel": 2}, TypeError)]
)
def test_invalid_scope_changes_nothing(fields, error):
    outer = get_parallel_config()
    with pytest.raises(error, match=next(iter(fields))), parallel_config(**fields):
        pass
    assert get_parallel_config() is outer


def test_scope_does_not_change_the_outer_config():
    config = TransformerOpParallelConfig()
    set_parallel_config(config)
    with parallel_config() as inside:
        inside.model_parallel = 2
        assert get_parallel_config().model_parallel == 2
    assert config == TransformerOpParallelConfig() and get_parallel_config() is config


def test_configs_are_public():
    for cls in DEFAULTS:
        assert getattr(dtransformer, cls.__name__) is cls
