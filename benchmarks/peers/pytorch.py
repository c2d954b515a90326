"""Contestant: PyTorch's Transformer layers, with `torch.compile` if the mode is `compiled`.

It uses the fastest options: no padding masks, causal attention, and fused AdamW.
"""

import os

import torch
from torch import nn
from workloads import serve, time_each_step


class _Embedding(nn.Module):
    def __init__(self, workload):
        super().__init__()
        self.tokens = nn.Embedding(workload.vocab_size, workload.hidden_size)
        self.positions = nn.Embedding(workload.length, workload.hidden_size)
        self.dropout = nn.Dropout(0.1)

    def forward(self, ids):
        positions = self.positions(torch.arange(ids.shape[1]))
        return self.dropout(self.tokens(ids) + positions)


class _Model(nn.Module):
    def __init__(self, workload):
        super().__init__()
        h = workload.hidden_size
        arguments = (h, workload.num_heads, workload.ffn_hidden_size, 0.1, "relu")
        options = {"batch_first": True, "norm_first": True}
        self.target = _Embedding(workload)
        self.encoder = None
        if workload.encoder_layers:
            self.source = _Embedding(workload)
            layer = nn.TransformerEncoderLayer(*arguments, **options)
            self.encoder = nn.TransformerEncoder(
                layer, workload.encoder_layers, nn.LayerNorm(h), enable_nested_tensor=False
            )
            layer = nn.TransformerDecoderLayer(*arguments, **options)
            self.decoder = nn.TransformerDecoder(layer, workload.decoder_layers, nn.LayerNorm(h))
        else:
            layer = nn.TransformerEncoderLayer(*arguments, **options)
            self.decoder = nn.TransformerEncoder(
                layer, workload.decoder_layers, nn.LayerNorm(h), enable_nested_tensor=False
            )
        self.head = nn.Linear(h, workload.vocab_size, bias=False)
        mask = nn.Transformer.generate_square_subsequent_mask(workload.length)
        self.register_buffer("mask", mask)

    def forward(self, source, target):
        y = self.target(target)
        if self.encoder is None:
            return self.head(self.decoder(y, mask=self.mask, is_causal=True))
        memory = self.encoder(self.source(source))
        return self.head(self.decoder(y, memory, tgt_mask=self.mask, tgt_is_causal=True))

    def forward_padded(self, source, target):
        """Run `forward` on sentences of different lengths, padded with 0."""
        hidden = source == 0
        memory = self.encoder(self.source(source), src_key_padding_mask=hidden)
        length = target.shape[1]
        y = self.decoder(
            self.target(target),
            memory,
            tgt_mask=self.mask[:length, :length],
            tgt_is_causal=True,
            memory_key_padding_mask=hidden,
        )
        return self.head(y)


def make_run(workload, mode):
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = _Model(workload).train()
    forward = torch.compile(model) if mode == "compiled" else model
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)

    def update(forward, source, target, labels, **options):
        optimizer.zero_grad(set_to_none=True)
        logits = forward(source, target).flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, labels.flatten(), **options)
        loss.backward()
        optimizer.step()
        return loss.item()

    def as_tensors(arrays):
        return [None if x is None else torch.from_numpy(x) for x in arrays]

    if hasattr(workload, "padded"):
        batches = [as_tensors(batch) for batch in workload.padded(by_length=mode == "by_length")]

        def one_pass():
            # Targets need no padding mask, because causal attention hides padding on the right.
            for batch in batches:
                update(model.forward_padded, *batch, ignore_index=0)

        return time_each_step(one_pass)
    batch = as_tensors(workload.batch())
    return time_each_step(lambda: update(forward, *batch))


if __name__ == "__main__":
    serve(make_run)
