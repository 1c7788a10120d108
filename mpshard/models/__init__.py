"""Models, one file each: ordered lists of modules with Hugging Face parameter names."""

from mpshard.models.gpt2 import GPT2Config, gpt2
from mpshard.models.llama import LlamaConfig, llama

__all__ = ["GPT2Config", "LlamaConfig", "gpt2", "llama"]
