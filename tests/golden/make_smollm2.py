"""Makes `smollm2.npz`: what PyTorch and transformers compute with the real SmolLM2-135M-Instruct in float32.

    python tests/golden/make_smollm2.py MODEL_DIR

Run it where `torch` and `transformers` are installed; two cores and 8 GB do. The tokens are those of this project's
`examples/mechanics/*.py`, each file followed by <|im_end|>; they are kept, as the files will change. Training is
`examples/peers/fsdp2_gpt.py`: FSDP2 on two ranks, 10 steps, AdamW as there, learning rate 1e-4.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).parents[2]
PROMPT = "The capital of France is"
SEQ, BATCH, STEPS, WORLD, LR = 128, 2, 10, 2, 1e-4


def main() -> None:
    directory = Path(sys.argv[1])
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    ids: list[int] = []
    for path in sorted((ROOT / "examples" / "mechanics").glob("*.py")):
        ids += [*tokenizer.encode(path.read_text()).ids, 2]
    train, evaluation = np.array(ids[: SEQ * BATCH * STEPS * WORLD + 1]), np.array(ids[-8 * SEQ - 1 :])

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    prompt = torch.tensor([tokenizer.encode(PROMPT).ids])
    with torch.no_grad():
        continuation = model.generate(prompt, max_new_tokens=20, do_sample=False)[0, prompt.shape[1] :]
        x, y = (torch.from_numpy(part).view(8, SEQ) for part in (evaluation[:-1], evaluation[1:]))
        loss = F.cross_entropy(model(x).logits.reshape(-1, model.config.vocab_size), y.reshape(-1)).item()
    del model
    with tempfile.NamedTemporaryFile(suffix=".npy") as file:
        np.save(file.name, train)
        options = {"hf": directory, "tokens": file.name, "seq": SEQ, "batch": BATCH, "steps": STEPS, "lr": LR}
        words = [str(word) for key, value in options.items() for word in (f"--{key}", value)]
        launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(WORLD)]
        said = subprocess.run([*launch, ROOT / "examples" / "peers" / "fsdp2_gpt.py", *words], check=True, capture_output=True, text=True)
    peer = json.loads(said.stdout.splitlines()[-1])
    np.savez_compressed(
        Path(__file__).parent / "smollm2.npz", train=train.astype(np.uint16), evaluation=evaluation.astype(np.uint16),
        eval_loss=loss, prompt=PROMPT, continuation=continuation.numpy(), losses=peer["losses"], grad_norms=peer["grad_norms"],
        seq=SEQ, batch=BATCH, lr=LR, versions=f"torch {torch.__version__}, transformers {transformers.__version__}")
    print(loss, tokenizer.decode(continuation.tolist()), peer)


if __name__ == "__main__":
    main()
