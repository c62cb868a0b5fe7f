"""Finds a step and its inputs by name: `train.py:step`, `package.module:step`.

The inputs are a function or value in the same file, `inputs` by default, that gives the arguments of one call: a tuple
of positional arguments, a dict of keyword arguments, or (tuple, dict). `jax.ShapeDtypeStruct`s will do.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from autoshard.errors import ArgumentError, explain


def load_step(target: str, inputs: str = "inputs") -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The object named by `target`, and the arguments to plan it with.

    Args:
      target: `file.py:name` or `package.module:name`.
      inputs: name of the inputs in the same file.

    Raises:
      ArgumentError: no such file, module or name, or inputs of another form.
    """
    place, colon, name = target.rpartition(":")
    if not colon or not place or not name:
        raise ArgumentError(
            explain(f"{target!r}", "file.py:step or package.module:step", "name the step after a colon")
        )
    module = _module(place)
    step = _attribute(module, place, name)
    if not callable(step):
        raise ArgumentError(explain(f"{target} is a {type(step).__name__}", "a function", "name the train step"))
    given = _attribute(module, place, inputs)
    args, kwargs = _arguments(given() if callable(given) else given, f"{place}:{inputs}")
    return step, args, kwargs


def _module(place: str) -> ModuleType:
    if not place.endswith(".py"):
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            todo = "check the name, or give the path of a .py file"
            raise ArgumentError(explain(f"module {place!r}: {error}", "a module that can be imported", todo)) from error
    path = Path(place)
    if not path.is_file():
        near = difflib.get_close_matches(
            path.name, [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        )
        todo = f"did you mean {near[0]}?" if near else "check the path"
        raise ArgumentError(explain(f"{place}: no such file", "a Python file", todo))
    name = f"_autoshard_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None, "a .py file has a spec"
    assert spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        sys.path.remove(str(path.parent))
    return module


def _attribute(module: ModuleType, place: str, name: str) -> Any:
    if hasattr(module, name):
        return getattr(module, name)
    names = [n for n in vars(module) if not n.startswith("_")]
    near = difflib.get_close_matches(name, names)
    expected = f"one of {', '.join(near)}" if near else f"a name defined there ({', '.join(names[:12])})"
    raise ArgumentError(explain(f"{place} has no {name!r}", expected, "correct the name, or define it"))


def _arguments(given: Any, where: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    match given:
        case dict():
            return (), cast("dict[str, Any]", given)
        case tuple((tuple(), dict())):
            return cast("tuple[tuple[Any, ...], dict[str, Any]]", given)
        case tuple():
            return cast("tuple[Any, ...]", given), {}
        case _:
            pass
    raise ArgumentError(
        explain(
            f"{where} gives a {type(given).__name__}",
            "a tuple of positional arguments, a dict of keyword arguments, or (tuple, dict)",
            "return the arguments of one call of the step",
        )
    )
