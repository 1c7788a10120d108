"""Makes the directories under `lora/`: adapters as PEFT saves them, for models of `families/`, and what they compute.

Run it where `torch`, `transformers` and `peft` are installed (none is needed to run the tests), after `make_families.py`:

    python tests/golden/make_lora.py

`expected.npz`: inputs, targets, logits, loss in float64, as there; gradients of the adapters.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
VOCAB, LENGTH, SEQUENCES = 61, 12, 2
CASES = {
    "gpt2": {"r": 3, "lora_alpha": 6, "target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True},
    "qwen2": {"r": 2, "lora_alpha": 5, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    "llama3_new": {"r": 4, "lora_alpha": 4, "target_modules": "all-linear"},
}


def main() -> None:
    torch.set_num_threads(1)
    for number, (name, options) in enumerate(CASES.items()):
        rng = np.random.default_rng(3000 + number)
        base, folder = HERE / "families" / name, HERE / "lora" / name
        shutil.rmtree(folder, ignore_errors=True)
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32),
                               LoraConfig(task_type="CAUSAL_LM", **options))
        with torch.no_grad():
            for key, p in model.named_parameters():
                if "lora_" in key:
                    p.copy_(torch.from_numpy(0.3 * rng.standard_normal(tuple(p.shape)).astype(np.float32)))
        model.save_pretrained(folder)
        (folder / "README.md").unlink()
        content = json.loads((folder / "adapter_config.json").read_text())
        content["base_model_name_or_path"] = f"families/{name}"  # no place of the machine that made it
        (folder / "adapter_config.json").write_text(json.dumps(content, indent=2) + "\n")
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64, attn_implementation="eager"),
                                          folder, is_trainable=True, autocast_adapter_dtype=False).double()
        tokens = rng.integers(VOCAB, size=(SEQUENCES, LENGTH + 1))
        inputs, targets = tokens[:, :-1].copy(), tokens[:, 1:].copy()
        targets[rng.random(targets.shape) < 0.2] = -100
        logits = model(torch.from_numpy(inputs)).logits
        loss = F.cross_entropy(logits.reshape(-1, VOCAB), torch.from_numpy(targets).reshape(-1))
        loss.backward()
        gradients = {f"gradient/{key.replace('.default', '')}": p.grad.numpy().astype(np.float32)
                     for key, p in model.named_parameters() if p.requires_grad}
        np.savez_compressed(folder / "expected.npz", inputs=inputs, targets=targets, logits=logits.detach().numpy(),
                            loss=loss.item(), **gradients)
        print(f"{name}: loss {loss.item():.4f}, {len(gradients)} gradients, {sum(f.stat().st_size for f in folder.iterdir())} bytes")


if __name__ == "__main__":
    main()
