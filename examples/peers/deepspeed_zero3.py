"""The second peer: DeepSpeed ZeRO-3 over gloo on CPU ranks, the GPT-2 shape of fsdp2_gpt.py.

    DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 deepspeed_zero3.py LAYERS D_MODEL HEADS SEQ BATCH [STEPS]

Prints one JSON line. Needs an environment of its own: pip install torch==2.13.0 numpy, then
DS_BUILD_OPS=0 pip install deepspeed.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time

import deepspeed
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

VOCABULARY = 8192
WARMUP = 2  # steps that do not count


class Block(nn.Module):
    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = (part.view(b, t, self.heads, d // self.heads).transpose(1, 2) for part in self.qkv(self.norm1(x)).split(d, 2))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, layers: int, d: int, heads: int, seq: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, d), nn.Embedding(seq, d)
        self.layers = nn.ModuleList(Block(d, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.layers:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).view(-1, VOCABULARY), targets.reshape(-1))


def main() -> None:
    layers, d, heads, seq, batch = map(int, sys.argv[1:6])
    steps = int(sys.argv[6]) if len(sys.argv) > 6 else 6
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = GPT(layers, d, heads, seq)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
        "train_micro_batch_size_per_gpu": batch, "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3, "overlap_comm": True, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}})
    random, times = np.random.default_rng(engine.global_rank), []
    for _ in range(steps):
        window = torch.from_numpy(random.integers(VOCABULARY, size=(batch, seq + 1)))
        start = time.perf_counter()
        loss = engine(window[:, :-1], window[:, 1:])
        engine.backward(loss)
        engine.step()
        times.append(time.perf_counter() - start)
    if engine.global_rank == 0:
        median = statistics.median(times[WARMUP:])
        print(json.dumps({
            "peer": f"deepspeed-{deepspeed.__version__}", "world": engine.world_size, "step_s": round(median, 4),
            "tokens_per_s": round(engine.world_size * batch * seq / median, 1), "loss": round(loss.item(), 4),
            "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)}))


if __name__ == "__main__":
    main()
