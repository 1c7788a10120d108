"""Writes nvidia_names.json: names and arguments of cuDNN's frontend and nvmath's cublasLt, as the stand-ins may have them. Run it
where both packages are installed (`pip install --no-deps nvidia-cudnn-frontend nvmath-python`).

No GPU is needed. cuDNN's graph is described by its compiled module, to which the frontend hands it down; cublasLt's module cannot
be imported without CUDA, so its signatures are read from the file.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.device.lazy_nvidia import MODULES

SIGNATURE = re.compile(r"^(?:\d+\. )?\w+\((.*)\)(?: -> .*)?$", re.MULTILINE)


def documented(thing: Any) -> list[str]:
    """Names of the arguments in the first line of a docstring such as pybind writes."""
    found = SIGNATURE.search(thing.__doc__)
    assert found is not None, thing
    depth, names, word = 0, [], ""
    for letter in found[1] + ",":
        depth += (letter in "[(") - (letter in "])")
        if letter == "," and depth == 0:
            names.append(re.split(r"[:=]", word)[0].strip())
            word = ""
        else:
            word += letter
    return [name for name in names if name not in ("", "self")]


def of_cudnn() -> dict[str, Any]:
    import cudnn

    graph = cudnn._pybind_module.backend_graph
    names: dict[str, Any] = {name: {"arguments": None, "members": {}} for name in MODULES["cudnn"]}
    for name in MODULES["cudnn"]:
        getattr(cudnn, name)
    for name in ("data_type", "heur_mode"):
        names[name]["members"] = dict.fromkeys(getattr(cudnn, name).__members__)
    for name in ("create_handle", "set_stream", "backend_version_string"):
        function = getattr(cudnn, name)
        names[name]["arguments"] = list(inspect.signature(function).parameters) if inspect.isfunction(function) else documented(function)
    names["pygraph"]["arguments"] = documented(graph.__init__)
    # What the frontend's own class takes by name, and the compiled one for what it hands down whole.
    names["pygraph"]["members"] = {
        **{name: documented(getattr(graph, name)) for name in ("sdpa", "sdpa_backward")},
        **{name: list(inspect.signature(getattr(cudnn.pygraph, name)).parameters)[1:]
           for name in ("tensor", "build", "get_workspace_size", "execute")}}
    names["tensor"]["members"] = {name: list(inspect.signature(getattr(cudnn.Tensor, name)).parameters)[1:]
                                  for name in ("set_output", "set_dim", "set_stride", "set_data_type")}
    return names


def of_cublaslt() -> dict[str, Any]:
    folder = Path(next(iter(find_spec("nvmath").submodule_search_locations))) / "bindings"
    text = next(folder.glob("cublasLt.*so")).read_bytes().decode("latin-1")
    stubs = ast.parse((folder / "cublasLt.pyi").read_text())
    classes = {node.name: {part.target.id: None for part in node.body if isinstance(part, ast.AnnAssign)}
               for node in stubs.body if isinstance(node, ast.ClassDef)}
    names: dict[str, Any] = {}
    for name in MODULES["nvmath.bindings.cublasLt"]:
        found = re.search(rf"\b{name}\(((?:\w+ \w+(?:, )?)*)\)", text)
        names[name] = {"arguments": [a.split()[-1] for a in found[1].split(",") if a] if found and name not in classes else None,
                       "members": classes.get(name, {})}
        assert name in classes or found, name
    return names


def main() -> None:
    names = {"versions": {name: metadata.version(name) for name in ("nvidia-cudnn-frontend", "nvmath-python")},
             "cudnn": of_cudnn(), "nvmath.bindings.cublasLt": of_cublaslt()}
    Path(__file__).with_name("nvidia_names.json").write_text(json.dumps(names, indent=1) + "\n")


if __name__ == "__main__":
    main()
