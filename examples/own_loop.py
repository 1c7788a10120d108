"""A training loop of your own: mpirun -n 2 python -m mpi4py examples/own_loop.py

(`-m mpi4py` lets an error on one rank end the job; without it the other ranks would wait for ever.)
"""

import argparse
from pathlib import Path

import numpy as np

import mpshard as mps

STEPS, SEQUENCES, SEQ_LEN = 30, 8, 64  # sequences of a step, over all ranks
text = np.frombuffer(Path(argparse.__file__).read_bytes(), np.uint8)  # tokens are bytes

model = mps.models.llama(mps.LlamaConfig(vocab_size=256, max_seq_len=SEQ_LEN, n_layers=2, d_model=64, n_heads=4))
sharded = mps.shard(model, prefetch=1)  # over all ranks; mps.shard(model, comm) for those of a communicator
optim = mps.AdamW(sharded, weight_decay=0.1, clip_grad_norm=1.0)
rank, world = sharded.mesh.rank, sharded.mesh.world


def batch_of(step: int) -> tuple[np.ndarray, np.ndarray]:
    """This rank's part of a step: inputs and targets, both (micro-batches, sequences, SEQ_LEN)."""
    starts = np.random.default_rng(step).integers(0, len(text) - SEQ_LEN, SEQUENCES)  # the same on every rank
    windows = text[starts[:, None] + np.arange(SEQ_LEN + 1)].reshape(-1, world, 2, SEQ_LEN + 1)
    mine = windows[:, rank]  # micro-batches of two sequences are dealt in turn
    return mine[..., :-1], mine[..., 1:]


for step in range(STEPS):
    optim.lr = mps.learning_rate(step, peak=1e-2, steps=STEPS, warmup=5)
    out = sharded.step(batch_of(step))
    optim.step()
    if rank == 0:
        print(f"step {step + 1:2d}  loss {out.loss:.4f}  gradient norm {out.grad_norm:.3f}", flush=True)
