"""Writes cupy_names.json: the names and arguments of the real CuPy that the stand-in may have. Run it where CuPy is installed.

No GPU is needed. cuBLAS's module cannot be imported without the library itself; its signatures are read from the file.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from pathlib import Path
from typing import Any

from tests.device.lazy_cupy import MODULES


def arguments(thing: Any) -> list[str] | None:
    """Names of a callable's arguments; from its docstring's first lines where Cython hides them. None: not a callable."""
    if not callable(thing):
        return None
    try:
        return [name for name in inspect.signature(thing).parameters if name not in ("self", "_obj", "_no_init", "kwargs")]
    except (TypeError, ValueError):
        found = re.search(r"^[\w. ]+\((.*)\)", thing.__doc__ or "", re.MULTILINE)
        parts = found[1].replace("\\*", "*").split(",") if found else []
        names = [part.split("=")[0].split()[-1].strip("* ") for part in parts if part.split("=")[0].split()]
        return [name for name in names if name not in ("self", "", "kwargs")]


def describe(thing: Any) -> dict[str, Any]:
    members = [name for name in dir(thing) if inspect.isclass(thing) and not name.startswith("_")]
    return {"arguments": arguments(thing), "members": {name: arguments(getattr(thing, name)) for name in members}}


def main() -> None:
    import cupy

    names: dict[str, Any] = {"version": cupy.__version__}
    for module, content in MODULES.items():
        try:
            real = importlib.import_module(module)
            names[module] = {name: describe(getattr(real, name)) for name in content}
        except ImportError:
            folder = Path(importlib.import_module("cupy_backends").__file__).parent / "cuda" / "libs"
            text = next(folder.glob(f"{module.rpartition('.')[2]}.*so")).read_bytes().decode("latin-1")
            found = {name: re.search(rf"\b{name}\(([^)]*)\)", text) for name in content}
            names[module] = {
                name: {"arguments": [a.split()[-1] for a in match[1].split(",")] if match else None, "members": {}}
                for name, match in found.items() if match or name in text}
    Path(__file__).with_name("cupy_names.json").write_text(json.dumps(names, indent=1) + "\n")


if __name__ == "__main__":
    main()
