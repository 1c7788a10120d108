"""The peer: PyTorch FSDP2 (`fully_shard`) over gloo on CPU ranks, doing the work that `mpshard bench step` does.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 fsdp2_gpt.py --arch llama --layers 6 --d-model 512
    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 fsdp2_gpt.py --hf MODEL_DIR --tokens TOKENS.npy

A GPT-2 or Llama stack with an untied head, fp32 or bf16, fused AdamW without decay on 1-D parameters, one global gradient
norm clipped at 1.0, random tokens unless --tokens gives some. Prints one JSON line: median step seconds, tokens/s over
all ranks, losses, gradient norms, the largest rank's peak resident memory.

Needs an environment of its own: pip install torch==2.13.0 numpy, and transformers for --hf.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    numbers = {"layers": 6, "d-model": 512, "heads": 8, "kv-heads": 0, "ff": 0, "seq": 256, "batch": 8, "accum": 1,
               "vocab": 8192, "steps": 8, "warmup": 2, "seed": 0}
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--arch", choices=["gpt2", "llama"], default="gpt2")
    parser.add_argument("--mode", choices=["fsdp", "ddp", "single"], default="fsdp")
    parser.add_argument("--bf16", action="store_true", help="parameters gathered and multiplied in bf16, gradients reduced in fp32")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--checkpoint", action="store_true", help="activation checkpointing per block")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--wd", type=float, default=0.1)
    parser.add_argument("--hf", help="a Hugging Face model directory instead of the shapes above")
    parser.add_argument("--tokens", help=".npy of integers; rank r reads rows r::world of consecutive seq + 1 windows")
    return parser.parse_args()


class RMSNorm(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(d))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weight, 1e-5)


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): GPT-2's with biases and GELU, Llama's with SwiGLU and rotary angles."""

    def __init__(self, a: argparse.Namespace) -> None:
        super().__init__()
        d, llama = a.d_model, a.arch == "llama"
        self.heads, self.kv_heads, self.llama = a.heads, a.kv_heads or a.heads, llama
        self.width = d // a.heads
        ff = a.ff or (int(8 * d / 3 / 64) * 64 if llama else 4 * d)
        norm = RMSNorm if llama else nn.LayerNorm
        self.norm1, self.norm2 = norm(d), norm(d)
        self.qkv = nn.Linear(d, d + 2 * self.kv_heads * self.width, bias=not llama)
        self.out = nn.Linear(d, d, bias=not llama)
        self.up = nn.Linear(d, ff, bias=not llama)
        self.down = nn.Linear(ff, d, bias=not llama)
        if llama:
            self.gate = nn.Linear(d, ff, bias=False)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor] | None) -> Tensor:
        b, t, d = x.shape
        kv = self.kv_heads * self.width
        q, k, v = (part.view(b, t, -1, self.width).transpose(1, 2) for part in self.qkv(self.norm1(x)).split([d, kv, kv], 2))
        if angles is not None:
            cos, sin = angles
            q, k = q * cos + turned(q) * sin, k * cos + turned(k) * sin
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.kv_heads != self.heads)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h) if self.llama else F.gelu(self.up(h), approximate="tanh"))


def turned(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


class GPT(nn.Module):
    def __init__(self, a: argparse.Namespace) -> None:
        super().__init__()
        self.recompute, self.width = a.checkpoint, a.d_model // a.heads
        self.tokens = nn.Embedding(a.vocab, a.d_model)
        self.layers = nn.ModuleList(Block(a) for _ in range(a.layers))
        self.positions = nn.Embedding(a.seq, a.d_model) if a.arch == "gpt2" else None
        self.norm = nn.LayerNorm(a.d_model) if a.arch == "gpt2" else RMSNorm(a.d_model)
        self.head = nn.Linear(a.d_model, a.vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x, t, angles = self.tokens(ids), ids.shape[1], None
        if self.positions is not None:
            x = x + self.positions(torch.arange(t))
        else:
            turns = torch.outer(torch.arange(t).float(), 10000 ** (-torch.arange(0, self.width, 2).float() / self.width))
            turns = torch.cat((turns, turns), -1)
            angles = turns.cos(), turns.sin()
        for block in self.layers:
            x = checkpoint(block, x, angles, use_reentrant=False) if self.recompute else block(x, angles)
        return self.head(self.norm(x))


def build(a: argparse.Namespace, world: int) -> tuple[nn.Module, Callable[[Tensor], Tensor], int, int]:
    """The model, sharded as asked; ids (b, t) -> logits (b, t, v); v; the number of parameters."""
    if a.hf:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(a.hf, dtype=torch.float32)
        model.config.use_cache = False
        if a.checkpoint:
            model.gradient_checkpointing_enable()
        model.train()
        blocks, vocab = model.model.layers if hasattr(model, "model") else model.transformer.h, model.config.vocab_size
    else:
        model = GPT(a)
        blocks, vocab = model.layers, a.vocab
    parameters = sum(p.numel() for p in model.parameters())
    if a.mode == "fsdp":
        options = {"mesh": init_device_mesh("cpu", (world,))}
        if a.bf16:
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)
    elif a.mode == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    forward = (lambda ids: model(input_ids=ids).logits) if a.hf else model
    return model, torch.compile(forward) if a.compile else forward, vocab, parameters


def batches(a: argparse.Namespace, vocab: int, rank: int, world: int) -> Callable[[int, int], tuple[Tensor, Tensor]]:
    """(step, micro-batch) -> this rank's inputs and targets (b, t)."""
    tokens = np.load(a.tokens, mmap_mode="r") if a.tokens else None
    random = np.random.default_rng(a.seed + rank)

    def batch(step: int, micro: int) -> tuple[Tensor, Tensor]:
        if tokens is None:
            rows = random.integers(vocab, size=(a.batch, a.seq + 1))
        else:
            first = ((step * a.accum + micro) * world + rank) * a.batch
            rows = np.stack([tokens[(first + j) * a.seq:(first + j + 1) * a.seq + 1] for j in range(a.batch)])
        window = torch.from_numpy(rows.astype(np.int64))
        return window[:, :-1], window[:, 1:]

    return batch


def all_reduced(value: float, world: int, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> float:
    tensor = torch.tensor(value)
    if world > 1:
        dist.all_reduce(tensor, op=op)
    return tensor.item()


def main() -> None:
    a = arguments()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.manual_seed(a.seed)
    rank, world = 0, 1
    if a.mode != "single":
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    model, forward, vocab, parameters = build(a, world)
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": a.wd}, {"params": rest, "weight_decay": 0.0}],
                                  lr=a.lr, betas=(0.9, 0.95), eps=1e-8, fused=True)
    batch = batches(a, vocab, rank, world)
    times, losses, norms = [], [], []
    for step in range(a.steps):
        start, total = time.perf_counter(), 0.0
        for micro in range(a.accum):
            inputs, targets = batch(step, micro)
            if a.mode == "fsdp":
                model.set_requires_gradient_sync(micro == a.accum - 1)
            loss = F.cross_entropy(forward(inputs).reshape(-1, vocab).float(), targets.reshape(-1)) / a.accum
            loss.backward()
            total += loss.item()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        times.append(time.perf_counter() - start)
        losses.append(all_reduced(total, world) / world)
        norms.append(norm.item())
    rss = all_reduced(float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss), world, dist.ReduceOp.MAX)
    if rank == 0:
        median = statistics.median(times[a.warmup:])
        print(json.dumps({
            "peer": f"pytorch-{torch.__version__}", "mode": a.mode, "world": world, "params": parameters, "bf16": a.bf16,
            "compile": a.compile, "step_s": round(median, 4), "tokens_per_s": round(world * a.batch * a.seq * a.accum / median, 1),
            "losses": [round(x, 5) for x in losses], "grad_norms": [round(x, 4) for x in norms], "peak_rss_mb": round(rss / 1024)}))
    if a.mode != "single":
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
