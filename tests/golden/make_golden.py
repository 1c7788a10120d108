"""Makes the golden files beside it: what PyTorch and transformers compute for small models.

Run it where `torch` and `transformers` are installed (neither is needed to run the tests):

    python tests/golden/make_golden.py

Each file holds one model, 20 steps of AdamW on batches that differ, and the same 20 steps in float64, so that
a test can tell rounding from error. What the entries are is told where they are read: `tests/golden/__init__.py`.

Sizes are uneven on purpose (vocabulary 101, width 26, heads of width 13, sequences with different numbers of
valid tokens, one without any), and nothing is at its usual initial value: norm weights differ from 1, biases from
0, matrices are large enough for the gradients not to be tiny.
"""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent
VOCAB, LENGTH, SEQUENCES, STEPS = 101, 10, 12, 20
LOGITS = 3  # sequences of the first step whose logits are kept
ADAMW = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
CLIP = 1.0


def models() -> dict[str, tuple[type, Any]]:
    gpt2 = GPT2Config(
        vocab_size=VOCAB, n_positions=32, n_embd=26, n_layer=2, n_head=2, activation_function="gelu_new",
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, tie_word_embeddings=True,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    llama = {
        "vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "max_position_embeddings": 32,
        "rms_norm_eps": 1e-5, "bos_token_id": 0, "eos_token_id": 0,
    }  # fmt: skip
    return {
        "gpt2": (GPT2LMHeadModel, gpt2),
        "llama": (LlamaForCausalLM, LlamaConfig(**llama, tie_word_embeddings=False)),
        "llama_tied": (
            LlamaForCausalLM,
            LlamaConfig(**llama, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
        ),
    }


def weights(model: torch.nn.Module, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """float32 values for every parameter, a tied one once, under its Hugging Face name."""
    values = {}
    for name, parameter in model.named_parameters():  # names a tied parameter once
        noise = rng.standard_normal(tuple(parameter.shape))
        is_norm_weight = parameter.ndim == 1 and name.endswith("weight")
        values[name] = (1 + 0.2 * noise if is_norm_weight else 0.15 * noise).astype(np.float32)
    return values


def batches(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """inputs, targets: (steps, sequences, length) int64; a noisy rule, so that there is something to learn."""
    tokens = np.empty((STEPS, SEQUENCES, LENGTH + 1), np.int64)
    tokens[..., 0] = rng.integers(VOCAB, size=(STEPS, SEQUENCES))
    for i in range(LENGTH):
        tokens[..., i + 1] = (3 * tokens[..., i] + 7 + rng.integers(2, size=(STEPS, SEQUENCES))) % VOCAB
    inputs, targets = tokens[..., :-1].copy(), tokens[..., 1:].copy()
    valid_length = rng.integers(1, LENGTH + 1, size=(STEPS, SEQUENCES, 1))
    targets[np.arange(LENGTH) >= valid_length] = -100
    targets[rng.random(targets.shape) < 0.1] = -100
    targets[0, 3] = -100  # a sequence without a valid token
    return inputs, targets


def train(
    model: torch.nn.Module, inputs: np.ndarray, targets: np.ndarray, dtype: torch.dtype
) -> dict[str, np.ndarray]:
    """20 steps in one precision; the loss of a step is the sum over its valid tokens divided by their number."""
    model.to(dtype).train()
    parameters = dict(model.named_parameters())
    decayed = [p for p in parameters.values() if p.ndim >= 2]
    others = [p for p in parameters.values() if p.ndim < 2]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, **ADAMW, foreach=False, fused=False)
    kept: dict[str, np.ndarray] = {}
    losses, norms = [], []
    for step in range(STEPS):
        logits = model(torch.from_numpy(inputs[step]), use_cache=False).logits
        target = torch.from_numpy(targets[step])
        # the head's logits straight into the loss: transformers' own loss would shift the targets again
        total = F.cross_entropy(logits.reshape(-1, VOCAB), target.reshape(-1), ignore_index=-100, reduction="sum")
        loss = total / (target != -100).sum()
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            kept["logits"] = logits[:LOGITS].detach().numpy()
            kept |= {f"gradient/{name}": p.grad.numpy().copy() for name, p in parameters.items()}
        losses.append(loss.item())
        norms.append(torch.nn.utils.clip_grad_norm_(list(parameters.values()), CLIP, foreach=False).item())
        optimizer.step()
    kept |= {f"final/{name}": p.detach().numpy().copy() for name, p in parameters.items()}
    return kept | {"losses": np.array(losses), "grad_norms": np.array(norms)}


def main() -> None:
    torch.set_num_threads(1)
    made_with = {
        "python": platform.python_version(), "torch": torch.__version__,
        "transformers": transformers.__version__, "numpy": np.__version__,
    }  # fmt: skip
    for number, (name, (build, config)) in enumerate(models().items()):
        rng = np.random.default_rng(1000 + number)
        config._attn_implementation = "eager"
        model = build(config)
        start = weights(model, rng)
        inputs, targets = batches(rng)
        runs = {}
        for suffix, dtype in (("", torch.float32), ("64", torch.float64)):
            model = build(config).to(dtype)
            with torch.no_grad():
                for key, parameter in model.named_parameters():
                    parameter.copy_(torch.from_numpy(start[key]))
            for key, value in train(model, inputs, targets, dtype).items():
                kind, slash, rest = key.partition("/")
                runs[f"{kind}{suffix}{slash}{rest}"] = value
        meta = made_with | {"adamw": ADAMW, "clip_grad_norm": CLIP, "decay": "parameters of 2 or more dimensions"}
        entries = {f"weight/{key}": value for key, value in start.items()} | runs
        entries |= {"inputs": inputs, "targets": targets}
        entries |= {"config": np.array(json.dumps(config.to_dict())), "meta": np.array(json.dumps(meta))}
        np.savez_compressed(HERE / f"{name}.npz", **entries)
        drift = max(abs(runs["losses"] / runs["losses64"] - 1))
        size = (HERE / f"{name}.npz").stat().st_size
        print(f"{name}: loss {runs['losses'][0]:.4f} -> {runs['losses'][-1]:.4f}, {size} bytes")
        print(f"  float32 against float64: losses differ by {drift:.1e}")
        for kind in ("gradient", "final"):
            keys = [key.partition("/")[2] for key in runs if key.startswith(f"{kind}/")]
            errors = {k: np.abs(runs[f"{kind}/{k}"] - runs[f"{kind}64/{k}"]).max() / np.abs(runs[f"{kind}64/{k}"]).max()
                      for k in keys}  # fmt: skip
            worst = sorted(errors, key=errors.__getitem__)[-3:]
            print(f"  {kind}:", ", ".join(f"{k} {errors[k]:.1e}" for k in worst))
        print("  grad norms", np.round(runs["grad_norms"][[0, 1, 2, 10, 19]], 3))


if __name__ == "__main__":
    main()
