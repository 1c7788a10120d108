"""Makes adamw_golden.npz with PyTorch (2.13.0 when it was last run): python tests/device/make_adamw_golden.py"""

from pathlib import Path

import numpy as np
import torch

STEPS, SIZE = 5, 23
SETTINGS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}

generator = torch.Generator().manual_seed(0)
weight = torch.randn(SIZE, generator=generator, dtype=torch.float32)
gradients = torch.randn(STEPS, SIZE, generator=generator, dtype=torch.float32)
parameter = torch.nn.Parameter(weight.clone())
optimizer = torch.optim.AdamW([parameter], **SETTINGS, foreach=False)
weights, first, second = [], [], []
for gradient in gradients:
    parameter.grad = gradient.clone()
    optimizer.step()
    state = optimizer.state[parameter]
    weights.append(parameter.detach().numpy().copy())
    first.append(state["exp_avg"].numpy().copy())
    second.append(state["exp_avg_sq"].numpy().copy())
np.savez(
    Path(__file__).with_name("adamw_golden.npz"),
    weight=weight.numpy(), gradients=gradients.numpy(), weights=weights, moment1=first, moment2=second,
    torch_version=torch.__version__,
)  # fmt: skip
