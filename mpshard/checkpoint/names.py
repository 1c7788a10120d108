"""What a directory calls our parameters, and which of its tensors are no weights of the model. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable

PREFIXES = ("transformer.", "model.")  # of the ...LMHeadModel and ...ForCausalLM classes; the bare models write none
HEAD = "lm_head.weight"
# Constants that older versions of transformers saved: masks and the rotary frequencies.
_BUFFERS = re.compile(r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias|(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


def match(parameters: Iterable[str], found: Iterable[str]) -> tuple[dict[str, str], set[str]]:
    """(our name -> the directory's name, the directory's tensors that are not to be read).

    Not read are known buffers and, if the model's embedding is its output projection, a copy of it under the
    projection's name. A parameter whose tensor is missing keeps its name.
    """
    ours, theirs = list(parameters), set(found)
    names = {name: name for name in ours}
    for prefix in PREFIXES:
        if any(name.startswith(prefix) for name in ours) and not any(name.startswith(prefix) for name in theirs):
            names = {name: name.removeprefix(prefix) for name in ours}
    ignored = {name for name in theirs if _BUFFERS.fullmatch(name)}
    if HEAD not in names:
        ignored |= theirs & {HEAD}
    return names, ignored
