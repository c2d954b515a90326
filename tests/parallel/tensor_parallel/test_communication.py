"""Layers on a mesh send the predicted elements, and reports show them."""

import keras

from dtransformer.layers import FeedForward, VocabEmbedding
from tests.on_mesh import (
    HIDDEN,
    ROWS,
    SOURCE,
    TARGET,
    TARGET_LENGTH,
    VOCAB_SIZE,
    losses,
    make_trainer,
    on_mesh,
    report_after_a_step,
    sent_collectives,
    start,
)


@on_mesh
def test_block_communication_matches_the_formula():
    report = report_after_a_step({"decoder_layers": 2}, model_parallel=4)
    of_decoder = 3, TARGET
    blocks = {
        "encoder/block_0": (2, SOURCE),
        "decoder/block_0": of_decoder,
        "decoder/block_1": of_decoder,
    }
    for block, (parts, entries) in blocks.items():
        assert sent_collectives(report, block) == [
            *[("backward", "all-reduce", entries)] * parts,
            *[("forward", "all-reduce", entries)] * parts,
        ]
        assert report.formula[block] == report.summed_elements(block) == 2 * parts * entries
    # The decoder's blocks add up the gradient of the memory, which is sent once.
    assert [c.elements for c in report.get_layer("AddN")] == [SOURCE]
    expected = {"loss", "accuracy", "head", "encoder", "decoder", "AddN"}
    assert {c.layer.split("/")[0] for c in report.collectives} == expected
    for part in ("loss", "accuracy"):
        assert report.get_layer(part)
        assert all(c.elements == ROWS * TARGET_LENGTH for c in report.get_layer(part)), part
    assert sent_collectives(report, "head") == [("backward", "all-reduce", TARGET)]
    assert {(c.over, c.group_size) for c in report.collectives} == {("model", 4)}
    sent = sum(c.bytes_sent for c in report.get_layer("encoder/block_0"))
    assert sent == 4 * SOURCE * 4 * 2 * 3 // 4, "a ring of four sends 2·3/4 of each tensor"
    text = str(report)
    assert "encoder/block_0/attention" in text and "Theory and measurement by block" in text


@on_mesh
def test_sequence_parallelism_replaces_large_all_reduces():
    report = report_after_a_step(sequence_parallel=True, vocab_emb_dp=False)
    large = [
        c
        for c in report.collectives
        if c.sent_as == "all-reduce" and c.elements > ROWS * TARGET_LENGTH
    ]
    assert not large, large
    kinds = [entry[:2] for entry in sent_collectives(report, "encoder/block_0")]
    assert kinds.count(("forward", "all-to-all")) == 4, "two gathers and two scatters"
    assert kinds.count(("backward", "all-to-all")) == 4
    # Scales and offsets of norms and biases after the sums are vectors of the hidden size.
    small = [
        entry for entry in sent_collectives(report, "encoder/block_0") if entry[1] == "all-reduce"
    ]
    assert {entry[2] for entry in small} == {HIDDEN}
    volume = report.summed_elements("encoder/block_0") - sum(entry[2] for entry in small)
    assert volume == 4 * SOURCE, "the volume must equal the volume of all-reduces"


@on_mesh
def test_row_sharded_embedding_sends_one_all_reduce_per_lookup():
    report = report_after_a_step(vocab_emb_dp=False)
    assert sent_collectives(report, "source_embedding") == [("forward", "all-reduce", SOURCE)]
    assert sent_collectives(report, "target_embedding") == [("forward", "all-reduce", TARGET)]


class ManualHead(keras.Model):
    """Model that multiplies by the transposed embedding table without a head layer."""

    def __init__(self):
        super().__init__()
        self.embedding = VocabEmbedding(VOCAB_SIZE, HIDDEN)
        self.block = FeedForward(HIDDEN, 4 * HIDDEN, dropout_rate=0.0)

    def call(self, inputs):
        x, table = self.embedding(inputs["target"])
        return keras.ops.matmul(self.block(x), keras.ops.transpose(table))


@on_mesh
def test_logits_of_a_manual_head_stay_sharded():
    start(data_parallel=2, vocab_emb_dp=False)
    trainer = make_trainer(ManualHead())
    losses(trainer, steps=1)
    report = trainer.communication_report()
    loss_collectives = [c for part in ("loss", "accuracy") for c in report.get_layer(part)]
    assert loss_collectives and all(c.elements <= ROWS * TARGET_LENGTH for c in loss_collectives)
    # The largest all-reduce sums the input gradients over the vocabulary shards.
    assert max(c.elements for c in report.collectives) <= TARGET
