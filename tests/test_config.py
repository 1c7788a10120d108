"""Configuration: what is accepted comes back equal, what is not is refused in one line with the remedy."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mpshard import config as cfg
from mpshard.config import Config, ConfigError

SMALL = Path(__file__).parent / "golden" / "families" / "smollm2"
EXAMPLES = Path(__file__).parent.parent / "examples"


def error_of(*overrides: str, world: int = 1) -> str:
    with pytest.raises(ConfigError) as caught:
        cfg.validate(cfg.load(None, overrides), world)
    return str(caught.value)


def test_defaults_are_valid_and_derived():
    config = cfg.load(None)
    cfg.validate(config, world=4)
    assert (config.model.n_kv_heads, config.model.d_ff) == (config.model.n_heads, 4 * config.model.d_model)
    assert (config.model.vocab_size, config.model.max_seq_len) == (256, config.data.seq_len)
    assert (config.data.eval, config.run.dir) == ("stdlib", "runs/default")
    assert cfg.resolve(config, "other") == config


# 2/3 of 4 d, as Llama 1 (Touvron et al. 2023, section 2.2), which rounds up to multiples of 256 where we take 64.
@pytest.mark.parametrize(("d_model", "d_ff"), [(512, 1408), (768, 2048), (4096, 10944), (26, 128)])
def test_llama_mlp_width(d_model, d_ff):
    assert cfg.load(None, ["model.arch=llama", f"model.d_model={d_model}"]).model.d_ff == d_ff


def test_overrides_are_toml_or_bare_strings():
    config = cfg.load(
        None,
        ["optim.lr=1", "optim.betas=[0.8, 0.9]", "data.train=a b/*.txt", 'data.eval=["x", "y"]', "run.dir=2024",
         "model.tie_embeddings=false", 'train.sample_prompt="a\\n=b"', "train.steps=7", "train.steps = 8"],
    )  # fmt: skip
    assert config.optim.lr == 1.0 and type(config.optim.lr) is float
    assert config.optim.betas == (0.8, 0.9)
    assert (config.data.train, config.data.eval) == ("a b/*.txt", ("x", "y"))
    assert (config.run.dir, config.train.sample_prompt, config.train.steps) == ("2024", "a\n=b", 8)
    assert config.model.tie_embeddings is False


def test_a_file_and_overrides_on_top(tmp_path):
    path = tmp_path / "my run.toml"
    path.write_text('[model]\nd_model = 26\nn_heads = 2\n[data]\ntrain = "corpus.txt"\n')
    config = cfg.load(path, ["model.n_heads=13"])
    assert (config.model.d_model, config.model.n_heads) == (26, 13)
    assert (config.data.eval, config.run.dir) == ("none", "runs/my run")


TEXT = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = st.fixed_dictionaries(
    {},
    optional={
        "model": st.builds(cfg.ModelConfig, arch=st.sampled_from(["gpt2", "llama"]), d_model=st.integers(1, 2**40),
                           norm_eps=st.floats(1e-300, 1e300), tie_embeddings=st.booleans()),
        "data": st.builds(cfg.DataConfig, train=TEXT.filter(bool) | st.lists(TEXT.filter(bool), min_size=1).map(tuple)),
        "train": st.builds(cfg.TrainConfig, sample_prompt=TEXT, seed=st.integers(0, 2**63 - 1)),
        "optim": st.builds(cfg.OptimConfig, lr=st.floats(0, 1e300), no_decay=st.lists(TEXT).map(tuple),
                           betas=st.tuples(st.floats(0, 0.999), st.floats(0, 0.999))),
    },
)  # fmt: skip


@given(VALUES)
@example({"train": cfg.TrainConfig(sample_prompt="".join(map(chr, range(0x20))) + "\"\\\x7f\x85\u2028\U0001f600")})
def test_written_configuration_reads_back_equal(tmp_path_factory, values):
    config = cfg.resolve(Config(**values))
    path = tmp_path_factory.getbasetemp() / "effective.toml"
    path.write_text(cfg.to_toml(config), newline="", encoding="utf-8")
    assert cfg.load(path) == config


def test_effective_configuration_leaves_out_keys_without_effect():
    assert "rope_theta" not in cfg.to_toml(cfg.load(None))
    assert "rope_theta" in cfg.to_toml(cfg.load(None, ["model.arch=llama"]))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.lrr=1", "unknown key optim.lrr; did you mean optim.lr?"),
        ("optm.lr=1", "unknown section optm; did you mean optim?"),
        ("lr=1", "unknown key lr; did you mean optim.lr?"),
        ("model.seed=1", "unknown key model.seed; did you mean train.seed?"),
        ("optim=1", "optim is a section; write optim.key=value"),
        ("optim.lr", "'optim.lr' is not an override; write section.key=value"),
        ("train.steps=true", "train.steps=true is a boolean; needed: integer"),
        ("train.steps=1e3", "train.steps=1000.0 is a number with a point; needed: integer"),
        ("model.tie_embeddings=1", "model.tie_embeddings=1 is an integer; needed: true|false"),
        ("optim.lr=true", "optim.lr=true is a boolean; needed: number"),
        ("optim.lr=nan", "optim.lr=nan is not a finite number"),
        ("optim.lr=-inf", "optim.lr=-inf is not a finite number"),
        ("optim.lr=fast", 'optim.lr="fast" is a string; needed: number'),
        ("optim.betas=0.9", "optim.betas=0.9 is a number with a point; needed: list of 2 numbers"),
        ("optim.betas=[0.9]", "optim.betas=[0.9] has 1 elements; needed: list of 2 numbers"),
        ("optim.betas=[0.9, 1]", "optim.betas=[0.9, 1] must all be in [0, 1)"),
        ("optim.lr=-1", "optim.lr=-1 must be at least 0"),
        ("data.seq_len=-5", "data.seq_len=-5 must be at least 1"),
        ("train.seed=99999999999999999999", "train.seed=99999999999999999999 does not fit 64 bits"),
        ("data.ignore_index=3", "data.ignore_index=3 must be at most -1"),
        ("data.train=", 'data.train="" names nothing'),
        ("data.train=[]", "data.train=[] names nothing"),
        ("data.train=[a.txt", "data.train=[a.txt is not valid TOML; quote strings, close what is open"),
        ("model.arch=lama", 'model.arch="lama" is unknown; did you mean llama?'),
        ("run.device=tpu9", 'run.device="tpu9" is unknown; use auto|numpy|cupy'),
        ("data.tokenizer=gpt2", 'data.tokenizer="gpt2" is neither "bytes" nor a tokenizer.json nor a directory with one'),
        ("run.dir=a\udc80", 'run.dir="a\\udc80" is not valid Unicode'),
        # keys that would do nothing
        ("model.rope_theta=5", "model.rope_theta=5.0 has no effect with model.arch=gpt2; remove it"),
        ("train.sample_prompt=x", 'train.sample_prompt="x" needs train.sample_tokens above 0'),
        ("precision.products=bf16", 'precision.products="bf16" is unknown; use param|fp8'),
        # combinations
        ("model.n_heads=7", "model.n_heads=7 does not divide model.d_model=256; nearest d_model: 259"),
        ("data.seq_len=300 model.max_seq_len=200",
         "data.seq_len=300 is over model.max_seq_len=200; raise the latter or remove it"),
        ("model.n_kv_heads=2", "model.n_kv_heads=2 with model.n_heads=8: gpt2 has no grouped heads; "
                               "remove it or use model.arch=llama"),
        ("model.arch=llama model.n_kv_heads=3",
         "model.n_kv_heads=3 does not divide model.n_heads=8; use 1, 2, 4, 8"),
        ("model.arch=llama model.d_model=15 model.n_heads=5",
         "model.d_model / model.n_heads = 15 / 5 = 3 is odd; rotary embedding needs an even head width: change either"),
        ("optim.warmup_steps=9 train.steps=8", "optim.warmup_steps=9 is over train.steps=8; lower it"),
        ("optim.schedule=constant optim.min_lr_ratio=0.2",
         "optim.min_lr_ratio=0.2 has no effect with optim.schedule=constant; remove it"),
        ("guard.checksums=true shard.embedding=rows",
         "shard.embedding=rows has no effect with guard.checksums=true, which looks at every unit whole; use auto"),
        ("data.train=x.txt train.eval_every=5", "train.eval_every=5 but data.eval is none; set data.eval or remove it"),
    ],
)  # fmt: skip
def test_refusals(override, message):
    overrides = [override] if ", " in override else override.split(" ")
    assert error_of(*overrides) == message


def test_batch_must_divide_over_ranks():
    assert error_of("train.global_batch_size=10", "train.micro_batch_size=4", world=3) == (
        "train.global_batch_size=10 is not a multiple of train.micro_batch_size x ranks = 4 x 3 = 12; nearest: 12"
    )
    assert error_of("train.global_batch_size=20", "train.micro_batch_size=4", world=3).endswith("nearest: 24")
    cfg.validate(cfg.load(None, ["train.global_batch_size=24", "train.micro_batch_size=4"]), world=3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[optim]\nlr = \n", "is not valid TOML: Invalid value (at line 2, column 6)"),
        ("[optim]\nlr = 1\nlr = 2\n", "is not valid TOML: Cannot overwrite a value (at line 3, column 7)"),
        ("optim = 3", "optim=3 should be a section: write [optim] above its keys"),
        ("lr = 3", "unknown key lr; did you mean optim.lr?"),
        ("[wheels]\n", "unknown section wheels; there are model, data, train, lora, optim, shard, precision, mesh, checkpoint, guard, run"),
        ('[optim]\n"l\\nr" = 3', "unknown key optim.l r; did you mean optim.lr?"),
        ("[optim]\nlr = {a = 1}", "optim.lr={'a': 1} is a table; needed: number"),
        ("[train]\nsteps = 2024-01-01", "train.steps=datetime.date(2024, 1, 1) is a date; needed: integer"),
        (f"[train]\nsteps = {'9' * 5000}", "is not valid TOML: Exceeds the limit"),
        (b"[optim]\n\xff", "is not UTF-8 at byte 8; is it a TOML file?"),
    ],
)
def test_bad_files(tmp_path, text, message):
    path = tmp_path / "bad.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        cfg.load(path)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_missing_file_and_directory(tmp_path):
    with pytest.raises(ConfigError, match="no configuration file .*nowhere.toml; is the path right"):
        cfg.load(tmp_path / "nowhere.toml")
    with pytest.raises(ConfigError, match="cannot read .*: Is a directory"):
        cfg.load(tmp_path)


def test_a_configuration_built_in_python_is_checked_too():
    config = cfg.load(None)
    wrong = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=1.5))
    with pytest.raises(ConfigError, match=r"train\.steps=1\.5 is a number with a point"):
        cfg.validate(wrong, world=1)


def test_every_key_is_described():
    rows = {name: rest for name, *rest in cfg.describe()}
    assert list(rows) == list(cfg.flat(Config()))
    assert all(text for *_, text in rows.values())
    assert rows["data.train"][:2] == ["string or list of strings", '"stdlib"']
    assert rows["model.activation"][2].endswith("(only with model.arch=gpt2)")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.name)
def test_examples_load(path, tmp_path):
    overrides = []
    if "init_from" in path.read_text():  # a model that is not there: its shapes, from a small one of its family
        content = json.loads((SMALL / "config.json").read_text()) | {"max_position_embeddings": 8192}
        (tmp_path / "config.json").write_text(json.dumps(content))
        overrides = [f"model.init_from={tmp_path}"]
    cfg.validate(cfg.load(path, overrides), world=2)


def test_imports_nothing_heavy():
    code = "import sys, mpshard.config; assert not {'mpi4py', 'cupy', 'rich'} & set(sys.modules), sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
