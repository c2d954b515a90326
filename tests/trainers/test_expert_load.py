"""Reports on the load of experts: logs, table and picture."""

import keras
import numpy as np
import pytest

from dtransformer import MoEConfig, parallel_config
from dtransformer.models import CausalLM
from dtransformer.trainers import Trainer

TOKENS, CHOSEN = 7, 2


def train(moe_config, epochs=1):
    moe = moe_config and MoEConfig(expert_num=4, num_experts_chosen=CHOSEN, **moe_config)
    model = CausalLM(50, hidden_size=8, num_heads=2, num_layers=2, moe_config=moe, dropout_rate=0.0)
    texts = np.random.default_rng(0).integers(4, 50, (8, TOKENS + 1)).astype("int32")
    texts[0, 3:] = 0  # Padding.
    trainer = Trainer(model)
    trainer.compile(keras.optimizers.SGD(0.01))
    trainer.fit(texts[:, :-1], texts[:, 1:], batch_size=4, epochs=epochs, verbose=0, shuffle=False)
    return trainer


def test_expert_load_covers_the_last_epoch(tmp_path):
    trainer = train({"capacity_factor": 0.5, "expert_group_size": TOKENS}, epochs=2)
    report, history = trainer.expert_load(), trainer.history.history
    assert [layer.layer.split("/")[-2] for layer in report.layers] == ["block_0", "block_1"]
    num_tokens = 8 * TOKENS - (TOKENS - 3)
    for layer in report.layers:
        assert (layer.tokens, layer.choices) == (num_tokens, num_tokens * CHOSEN)
        assert 0 < layer.dropped_share < 1
        assert 0 < layer.mean_entropy <= np.log(4)
        assert layer.layer in str(report)
    assert 0 < history["dropped_share"][-1] < 1
    assert history["busiest_expert"][-1] >= 1
    pytest.importorskip("matplotlib")
    report.write(tmp_path / "load.png")
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")


def test_recompute_does_not_change_the_expert_load():
    loads = []
    for recompute in (False, True):
        with parallel_config(recompute=recompute):
            loads.append(train({"expert_group_size": TOKENS}).expert_load())
    assert loads[0] == loads[1]


def test_micro_batches_do_not_change_the_expert_load():
    loads = []
    for micro_batches in (1, 2):
        with parallel_config(micro_batch_num=micro_batches):
            loads.append(train({"expert_group_size": 4, "capacity_factor": 0.8}).expert_load())
    for first, second in zip(*(load.layers for load in loads)):
        assert (first.accepted, first.choices) == (second.accepted, second.choices)
        np.testing.assert_allclose(first.entropy, second.entropy, rtol=1e-5)


def test_expert_load_without_experts_raises_an_error():
    with pytest.raises(ValueError, match="no expert load"):
        train(None).expert_load()
