"""Makes the directories under `families/`: small random models of every family as `transformers` saves them.

Run it where `torch` and `transformers` are installed (neither is needed to run the tests):

    python tests/golden/make_families.py

Beside config.json and the weights of each lies `expected.npz`, what transformers computes with them in float64: inputs,
targets (-100: not counted), logits, the sum of token losses over the number of valid tokens, its gradients. What varies:
old and new spelling of config.json, one file or indexed shards, fp32, bf16 and fp16, tied or not, names with and without
the class's prefix, buffers of older versions among the tensors, head widths that are not d_model / n_heads.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent / "families"
VOCAB, LENGTH, SEQUENCES = 61, 12, 2
LLAMA = {
    "vocab_size": VOCAB, "hidden_size": 20, "intermediate_size": 28, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 6, "max_position_embeddings": 32, "rms_norm_eps": 1e-5, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
GPT2 = {"vocab_size": VOCAB, "n_positions": 32, "n_embd": 20, "n_layer": 2, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
# Frequencies of a head of 6 are 1, 1/22, 1/464: with these numbers one stays, one lies between, one is slowed fully.
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 0.05, "high_freq_factor": 0.3, "original_max_position_embeddings": 16}


def old_spelling(content: dict[str, Any]) -> None:
    """config.json as transformers 4 wrote it."""
    rope = content.pop("rope_parameters")
    content["rope_theta"] = rope.pop("rope_theta")
    content["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    content["torch_dtype"] = content.pop("dtype")


def older_spelling(content: dict[str, Any]) -> None:
    """As the first Llamas: no theta, no head_dim, the scaling's kind under "type"."""
    old_spelling(content)
    del content["rope_theta"], content["head_dim"]
    if content["rope_scaling"]:
        content["rope_scaling"] = {"type": content["rope_scaling"].pop("rope_type"), **content["rope_scaling"]}


def as_hub_gpt2(folder: Path) -> None:
    """Tensors without prefix and with the masks, as the first GPT-2 on the hub."""
    tensors = {k.removeprefix("transformer."): v for k, v in load_file(folder / "model.safetensors").items()}
    mask = torch.tril(torch.ones(32, 32)).reshape(1, 1, 32, 32)
    tensors |= {f"h.{i}.attn.bias": mask.clone() for i in range(2)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def with_inverse_frequencies(folder: Path) -> None:
    for file in folder.glob("*-00001-*.safetensors"):
        name = "model.layers.0.self_attn.rotary_emb.inv_freq"
        save_file(load_file(file) | {name: torch.ones(3)}, file, metadata={"format": "pt"})
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        index["weight_map"][name] = file.name
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


# name: class, configuration, dtype on disk, largest file, change of config.json, change of the directory
CASES: dict[str, tuple[str, dict[str, Any], torch.dtype, str, Callable | None, Callable | None]] = {
    "gpt2": ("GPT2", GPT2 | {"activation_function": "gelu", "n_inner": 36, "tie_word_embeddings": False}, torch.float32, "1GB", None, None),
    "gpt2_hub": ("GPT2", GPT2, torch.float32, "1GB", None, as_hub_gpt2),
    "llama1": ("Llama", LLAMA | {"head_dim": 5 * 2, "num_attention_heads": 2}, torch.float16, "9kB", older_spelling,
               with_inverse_frequencies),
    "llama3": ("Llama", LLAMA | {"rope_parameters": LLAMA3 | {"rope_theta": 1e4}}, torch.bfloat16, "1GB", old_spelling, None),
    "llama3_new": ("Llama", LLAMA | {"rope_parameters": LLAMA3 | {"rope_theta": 1e4}, "tie_word_embeddings": True},
                   torch.bfloat16, "1GB", None, None),
    "llama_linear": ("Llama", LLAMA | {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
                                       "attention_bias": True, "mlp_bias": True}, torch.bfloat16, "1GB", None, None),
    "mistral": ("Mistral", LLAMA | {"sliding_window": 16}, torch.float32, "1GB", old_spelling, None),
    "qwen2": ("Qwen2", LLAMA | {"head_dim": 5 * 2, "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True},
              torch.bfloat16, "1GB", old_spelling, None),
    "qwen3": ("Qwen3", LLAMA | {"head_dim": 8, "tie_word_embeddings": True}, torch.bfloat16, "9kB", None, None),
    "smollm2": ("Llama", LLAMA | {"head_dim": 2 * 5, "num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 30,
                                  "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}},
                torch.bfloat16, "1GB", None, None),
}  # fmt: skip


def randomise(model: torch.nn.Module, rng: np.random.Generator) -> None:
    """Values that are nowhere at their usual start: norm weights about 1, biases not 0."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.from_numpy(rng.standard_normal(tuple(p.shape)).astype(np.float32))
            p.copy_(1 + 0.2 * noise if p.ndim == 1 and name.endswith("weight") else 0.2 * noise)


def main() -> None:
    torch.set_num_threads(1)
    for number, (name, (family, config, dtype, limit, respell, change)) in enumerate(CASES.items()):
        rng = np.random.default_rng(2000 + number)
        folder = HERE / name
        shutil.rmtree(folder, ignore_errors=True)
        model = getattr(transformers, f"{family}LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM")(
            getattr(transformers, f"{family}Config")(**config))
        randomise(model, rng)
        model.to(dtype).save_pretrained(folder, max_shard_size=limit)
        (folder / "generation_config.json").unlink()
        if respell:
            content = json.loads((folder / "config.json").read_text())
            respell(content)
            (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n")
        if change:
            change(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
        tokens = rng.integers(VOCAB, size=(SEQUENCES, LENGTH + 1))
        inputs, targets = tokens[:, :-1].copy(), tokens[:, 1:].copy()
        targets[rng.random(targets.shape) < 0.2] = -100
        logits = model(torch.from_numpy(inputs)).logits
        loss = F.cross_entropy(logits.reshape(-1, VOCAB), torch.from_numpy(targets).reshape(-1))
        loss.backward()
        gradients = {f"gradient/{k}": p.grad.numpy().astype(np.float32) for k, p in model.named_parameters()}
        np.savez_compressed(folder / "expected.npz", inputs=inputs, targets=targets, logits=logits.detach().numpy(),
                            loss=loss.item(), versions=f"torch {torch.__version__}, transformers {transformers.__version__}", **gradients)
        print(f"{name}: loss {loss.item():.4f}, {sum(f.stat().st_size for f in folder.iterdir())} bytes")


if __name__ == "__main__":
    main()
