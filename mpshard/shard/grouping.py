"""Which parameters make a unit: `shard.unit`. Pure; no MPI, no arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from mpshard.autograd.tensor import Parameter
from mpshard.config import ConfigError
from mpshard.nn.module import Model, Module
from mpshard.shard.schedule import Stage

Rule = str | int | Sequence[str]


@dataclass(frozen=True)
class Group:
    """A unit to be: its name, its parameters in storage order, the fused views over them, whether it learns."""

    name: str
    parameters: tuple[Parameter, ...]
    fused: tuple[Parameter, ...]
    trainable: bool


def group(model: Model, rule: Rule = "block") -> list[Group]:
    """Cut a model into units, in execution order.

    rule: "block", one unit a module; an int, that many consecutive blocks a unit; "500MB" (kB, MB, GB), consecutive
    modules up to so many bytes of float32; a list of patterns: parameters whose names match the first go into one unit,
    those that match the second into another, and so on, the rest by module.

    A unit's frozen parameters are stored apart from those that learn ("layers.3.frozen"), so that they cost neither
    gradient nor moments. Matrices lie before vectors: what decays by default and what does not are one piece each, and a
    slice is updated in two.
    """
    if not any(parameter.trainable for parameter in model.parameters):
        raise ConfigError("nothing in the model is trainable; see optim.trainable")
    name_of = _names(model, rule)
    units: dict[str, list[Parameter]] = {}
    for module in model.modules:
        for parameter in module.parameters:
            name = name_of[parameter.name] + ("" if parameter.trainable else ".frozen")
            units.setdefault(name, []).append(parameter)
    fused = [f for module in model.modules for f in module.fused]
    groups = []
    for name, parameters in units.items():
        parameters.sort(key=lambda p: len(p.shape) < 2)
        own = {p.name for p in parameters}
        views = tuple(f for f in fused if all(part.name in own for part in f.parts))
        groups.append(Group(name, tuple(parameters), views, parameters[0].trainable))
    whole = {view.name for g in groups for view in g.fused}
    for f in fused:
        f.apart = f.name not in whole
    return groups


def stages_of(model: Model, groups: Sequence[Group]) -> list[Stage]:
    """What the schedule must know of a model: a pure function of its modules and units."""
    unit_of: Mapping[str, str] = {p.name: g.name for g in groups for p in g.parameters}
    learning = {g.name for g in groups if g.trainable}
    stages = []
    for module in model.modules:
        reads = tuple(dict.fromkeys(unit_of[p.name] for p in (*module.borrowed, *module.parameters)))
        stages.append(Stage(module.name, reads, reads if module.backward_reads_weights else (),
                            tuple(name for name in reads if name in learning)))
    return stages


def tables(model: Model) -> list[Parameter]:
    """What is only ever looked up: a table that a head reads whole is none."""
    whole = {p.name for module in model.modules for p in module.borrowed}
    found = [module.looked_up for module in model.modules if module.looked_up is not None]
    return [table for table in found if table.name not in whole and table.size]


def tables_of(model: Model, groups: Sequence[Group]) -> dict[str, Parameter]:
    """{unit: its table that is only ever looked up}."""
    unit_of = {p.name: g.name for g in groups for p in g.parameters}
    return {unit_of[table.name]: table for table in tables(model)}


def _names(model: Model, rule: Rule) -> dict[str, str]:
    """{parameter name: unit name}."""
    if isinstance(rule, str) and rule != "block":
        runs = _by_bytes(model.modules, parse_bytes(rule))
    elif isinstance(rule, int):
        if rule < 1:
            raise ConfigError(f"shard.unit={rule} must be at least 1 block")
        blocks = model.modules[1:-1]
        runs = [[model.modules[0]], *(blocks[i:i + rule] for i in range(0, len(blocks), rule)), [model.modules[-1]]]
    else:
        runs = [[module] for module in model.modules]
    names = {p.name: _run_name(run) for run in runs for module in run for p in module.parameters}
    if not isinstance(rule, str | int):
        for parameter in names:
            for pattern in rule:
                if fnmatchcase(parameter, pattern):
                    names[parameter] = pattern
                    break
        for pattern in rule:
            if pattern not in names.values():
                raise ConfigError(f'shard.unit: no parameter is called "{pattern}" that an earlier pattern has not taken')
    return names


def _by_bytes(modules: Sequence[Module], limit: int) -> list[list[Module]]:
    runs: list[list[Module]] = []
    size = 0
    for module in modules:
        own = 4 * sum(p.size for p in module.parameters)
        if not runs or size + own > limit:
            runs.append([])
            size = 0
        runs[-1].append(module)
        size += own
    return runs


def _run_name(run: Sequence[Module]) -> str:
    return run[0].name if len(run) == 1 else f"{run[0].name}-{run[-1].name.removeprefix('layers.')}"


def parse_bytes(text: str) -> int:
    """"64MB" to 64000000; kB, MB, GB. ConfigError for anything else."""
    for suffix, factor in (("kB", 10**3), ("MB", 10**6), ("GB", 10**9)):
        number = text.removesuffix(suffix).strip()
        if text.endswith(suffix) and number.replace(".", "", 1).isdigit():
            return int(float(number) * factor)
    raise ConfigError(f'shard.unit="{text}" is not known; use "block", a number of blocks, a size such as "64MB", or a list of patterns')
