"""Time PyTorch's language model on a GPU with fused attention, 16-bit autocast and fused AdamW.

    python pytorch_language_model.py eager|compiled BLOCKS HIDDEN HEADS LENGTH ROWS VOCABULARY STEPS

Prints the seconds of the first step, the seconds per step in three rounds, and the peak in GiB.
"""

import sys
import time

import torch
from torch import nn
from torch.nn import functional


class _Block(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(2))
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norms[1](x)), approximate="tanh"))


class _Model(nn.Module):
    def __init__(self, blocks, hidden, heads, length, vocabulary):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, hidden)
        self.positions = nn.Embedding(length, hidden)
        self.blocks = nn.ModuleList(_Block(hidden, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(hidden)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return functional.linear(self.norm(x), self.tokens.weight)


def main():
    mode, *numbers = sys.argv[1:]
    blocks, hidden, heads, length, rows, vocabulary, steps = map(int, numbers)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = _Model(blocks, hidden, heads, length, vocabulary).to(device)
    forward = torch.compile(model) if mode == "compiled" else model
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    ids = torch.randint(vocabulary, (rows, length), device=device)
    if device == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True

    def step():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16):
            logits = forward(ids)
            loss = functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        return loss

    def seconds(num_steps):
        start_time = time.perf_counter()
        for _ in range(num_steps):
            loss = step()
        loss.item()
        return (time.perf_counter() - start_time) / num_steps

    print(seconds(1))
    seconds(2)
    print(*(seconds(steps) for _ in range(3)))
    print(torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0)


if __name__ == "__main__":
    main()
