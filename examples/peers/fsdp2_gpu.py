"""The Llama of gpu_check.py by PyTorch's FSDP2 (fully_shard) on one GPU: bf16 weights, fp32 masters, fused AdamW, clip 1.0.

Prints one JSON line. Exit status 3 where there is no PyTorch with a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time

try:
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch import nn
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
except ImportError as error:
    print(f"no PyTorch with FSDP2: {error}", file=sys.stderr)
    sys.exit(3)
if not torch.cuda.is_available():
    print("PyTorch finds no GPU", file=sys.stderr)
    sys.exit(3)

parser = argparse.ArgumentParser()
for key, default in {"layers": 16, "d_model": 2048, "heads": 32, "kv_heads": 8, "ff": 8192, "vocab": 32000, "seq": 2048,
                     "batch": 4, "steps": 8, "warmup": 2}.items():
    parser.add_argument("--" + key.replace("_", "-"), type=int, default=default)
a = parser.parse_args()
width = a.d_model // a.heads


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(a.d_model))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, 1e-5)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        kv = a.kv_heads * width
        self.norm1, self.norm2 = RMSNorm(), RMSNorm()
        self.qkv = nn.Linear(a.d_model, a.d_model + 2 * kv, bias=False)
        self.out = nn.Linear(a.d_model, a.d_model, bias=False)
        self.gate_up, self.down = nn.Linear(a.d_model, 2 * a.ff, bias=False), nn.Linear(a.ff, a.d_model, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q, k, v = (part.view(b, t, -1, width).transpose(1, 2) for part in self.qkv(self.norm1(x)).split(
            [a.d_model, a.kv_heads * width, a.kv_heads * width], 2))

        def turned(z: torch.Tensor) -> torch.Tensor:
            first, second = z.chunk(2, -1)
            return z * cos + torch.cat((-second, first), -1) * sin

        y = F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, -1))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(a.vocab, a.d_model)
        self.blocks = nn.ModuleList(Block() for _ in range(a.layers))
        self.norm, self.head = RMSNorm(), nn.Linear(a.d_model, a.vocab, bias=False)

    def forward(self, ids: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29511")
dist.init_process_group("nccl", rank=0, world_size=1)
torch.manual_seed(0)
with torch.device("cuda"):
    model = Llama()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
    turns = torch.outer(torch.arange(a.seq).float(), 10000 ** (-torch.arange(0, width, 2).float() / width)).repeat(1, 2)
    cos, sin = turns.cos().bfloat16(), turns.sin().bfloat16()
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for block in model.blocks:
    fully_shard(block, mp_policy=policy)
fully_shard(model, mp_policy=policy)
optim = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
times, losses = [], []
for _ in range(a.steps):
    tokens = torch.randint(a.vocab, (a.batch, a.seq + 1), device="cuda")
    torch.cuda.synchronize()
    start = time.perf_counter()
    loss = F.cross_entropy(model(tokens[:, :-1], cos, sin).flatten(0, 1).float(), tokens[:, 1:].flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optim.step()
    optim.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    times.append(time.perf_counter() - start)
    losses.append(round(loss.item(), 4))
step_s = statistics.median(times[a.warmup:])
print(json.dumps({"peer": f"pytorch {torch.__version__} FSDP2", "step_s": round(step_s, 4), "tokens_per_s": round(a.batch * a.seq / step_s),
                  "peak_bytes": torch.cuda.max_memory_allocated(), "losses": losses}))
dist.destroy_process_group()
