"""Commands that use a trained model: `mpshard sample`, `mpshard eval`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpshard import config
from mpshard.commands import Add, show
from mpshard.config import Config, ConfigError

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpshard.data import Tokenizer

EVAL_LEN = 1024  # tokens of a window, unless data.seq_len or the model says otherwise


def register(add: Add) -> None:
    """Add the commands to the parser; see `mpshard.commands`."""
    sub = add("sample", sample, "Continue a text, or answer, with a model sharded over the ranks.",
              'mpirun -n 2 mpshard sample DIR --prompt "The capital of France is" --tokens 20')
    _add_model(sub)
    sub.add_argument("--prompt", default="", help="the text; empty = the start of a document; - = standard input")
    sub.add_argument("--tokens", type=int, default=100, help="how many at most (default 100)")
    sub.add_argument("--temperature", type=float, default=0.0, help="0 = always the likeliest (default), 1 = as the model says")
    sub.add_argument("--top-k", type=int, default=0, help="only the k likeliest; 0 = all (default)")
    sub.add_argument("--top-p", type=float, default=1.0, help="only the likeliest that together have p; 1 = all (default)")
    sub.add_argument("--seed", type=int, default=0, help="of the draws (default 0)")
    sub.add_argument("--chat", action="store_true", help="the prompt is a message, the model answers: by its chat template")
    sub.add_argument("--system", default="", help="with --chat: what the system message says")
    sub.add_argument("--ignore-end", action="store_true", help="go on after an end of text")

    sub = add("eval", evaluate, "Mean loss of a model over all tokens of some data.",
              "mpirun -n 2 mpshard eval DIR --data corpus/*.txt data.seq_len=512 --json")
    _add_model(sub)
    sub.add_argument("--data", required=True, action="extend", nargs="+", metavar="FILE",
                     help="as data.eval: text, .jsonl, .bin or .npy files, a glob, or stdlib")


def _add_model(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("directory", metavar="DIR", help="a Hugging Face model directory, a checkpoint or a run (its latest checkpoint)")
    sub.add_argument("settings", metavar="section.key=value", nargs="*", help="changes to the configuration, as data.seq_len=512")
    sub.add_argument("--json", action="store_true", help="print one JSON object")


def _load(directory: str, settings: Sequence[str], seq_len: int) -> Config:
    """The configuration for a model in a directory. `seq_len` unless set; no longer than the model's context."""
    from mpshard.checkpoint import publish

    found = publish.find(Path(directory))
    wrong = [setting for setting in settings if "=" not in setting]
    if wrong:
        raise ConfigError(f"{wrong[0]!a} is not an override; write section.key=value")
    settings = [f"model.init_from={found}", *settings]
    loaded = config.load(None, [f"data.seq_len={seq_len}", *settings])
    m = loaded.model
    context = min(m.max_seq_len, m.sliding_window or m.max_seq_len, seq_len)
    return config.load(None, [f"data.seq_len={context}", *settings])


def sample(arguments: argparse.Namespace, world: MPI.Comm) -> None:
    """`mpshard sample DIR`."""
    from mpshard import train as training
    from mpshard.comm.agree import agree
    from mpshard.data import load_tokenizer
    from mpshard.sample import Sampling, generate

    a = arguments
    if a.tokens < 0:
        raise ConfigError(f"--tokens={a.tokens} must be 0 or more")
    if a.system and not a.chat:
        raise ConfigError("--system has no effect without --chat; remove it")
    sampling = Sampling(a.temperature, a.top_k, a.top_p, a.seed)
    settings = agree(world, lambda: _load(a.directory, a.settings, 1))
    tokenizer = agree(world, lambda: load_tokenizer(settings.data.tokenizer))
    text = world.bcast(sys.stdin.read() if a.prompt == "-" and world.rank == 0 else a.prompt)
    prompt = agree(world, lambda: _prompt(text, a, settings, tokenizer))
    sharded = training.build_sharded(settings, world)
    speaks = world.rank == 0 and not a.json
    if speaks and not a.chat:
        print(text, end="", flush=True)
    stop = set() if a.ignore_end else _ends(settings.model.init_from, tokenizer)
    printer = _Printer(tokenizer, speaks)
    new = generate(sharded, prompt, a.tokens, sampling, stop, printer.add)[len(prompt):]
    sharded.close()
    if speaks:
        print(flush=True)
    elif world.rank == 0:
        print(json.dumps({"text": tokenizer.decode(new), "tokens": new, "prompt_tokens": len(prompt)}), flush=True)


def _prompt(text: str, a: argparse.Namespace, settings: Config, tokenizer: Tokenizer) -> list[int]:
    """Token ids of the prompt; at least one."""
    from mpshard.data import load_chat_template

    if a.chat:
        messages = [{"role": "system", "content": a.system}] * bool(a.system) + [{"role": "user", "content": text}]
        template = load_chat_template(settings.model.init_from, tokenizer, settings.data.chat_template)
        ids = tokenizer.encode(template.render(messages, "--prompt", prompt=True), special=False)
    else:
        ids = tokenizer.encode(text)
    found = [int(i) for i in ids] or [tokenizer.separator]
    if max(found) >= settings.model.vocab_size:
        raise ConfigError(f"{settings.data.tokenizer} has id {max(found)}, outside the model's vocabulary of {settings.model.vocab_size}")
    return found


def _ends(directory: str, tokenizer: Tokenizer) -> set[int]:
    """Ids after which a text is over: the tokenizer's, and those of generation_config.json, which may name several."""
    from mpshard.families import read_json

    path = Path(directory) / "generation_config.json"
    named = [tokenizer.special_ids.get("eos_token_id"), read_json(path).get("eos_token_id") if path.exists() else None]
    ids = [i for found in named for i in (found if isinstance(found, list) else [found])]
    return {tokenizer.separator, *(i for i in ids if type(i) is int)}


class _Printer:
    """Writes text as tokens come; a character of several tokens when it is whole."""

    def __init__(self, tokenizer: Tokenizer, speaks: bool) -> None:
        self.tokenizer, self.speaks = tokenizer, speaks
        self.ids: list[int] = []
        self.written = 0

    def add(self, token: int) -> None:
        if self.speaks:
            self.ids.append(token)
            text = self.tokenizer.decode(self.ids)
            if not text.endswith("\ufffd"):
                print(text[self.written:], end="", flush=True)
                self.written = len(text)


def evaluate(arguments: argparse.Namespace, world: MPI.Comm) -> None:
    """`mpshard eval DIR --data FILES`."""
    from mpshard import train as training
    from mpshard.comm.agree import agree
    from mpshard.data import load_tokenizer, open_batches

    def load() -> tuple[Config, Any]:
        data = json.dumps(arguments.data)
        # The training data is not opened; naming the same leaves nothing to refuse.
        settings = _load(arguments.directory, [f"data.train={data}", f"data.eval={data}", *arguments.settings], EVAL_LEN)
        train = dataclasses.replace(settings.train, global_batch_size=settings.train.micro_batch_size * world.size)
        settings = dataclasses.replace(settings, train=train)
        config.validate(settings, world.size)
        return settings, open_batches(settings, load_tokenizer(settings.data.tokenizer), "eval")

    settings, batches = agree(world, load)
    sharded = training.build_sharded(settings, world)
    loss, tokens = training.evaluate(sharded, batches, settings.train.micro_batch_size, settings.train.eval_batches)
    sharded.close()
    show({"eval_loss": loss, "tokens": tokens}, lambda found: f"evaluation loss {loss:.4f} over {tokens:,} tokens", arguments.json, world)
