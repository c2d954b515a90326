"""The contestant: PyTorch's own Transformer layers; with `compiled`, by `torch.compile`.

No padding masks, attention that knows it is causal, and the fused AdamW: what is fastest.
"""

import os

import torch
from torch import nn
from workloads import one_by_one, serve


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


def make_run(workload, mode):
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = _Model(workload).train()
    forward = torch.compile(model) if mode == "compiled" else model
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    source, target, labels = (
        None if ids is None else torch.from_numpy(ids) for ids in workload.batch()
    )

    def step():
        optimizer.zero_grad(set_to_none=True)
        logits = forward(source, target)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        return loss.item()

    return one_by_one(step)


if __name__ == "__main__":
    serve(make_run)
