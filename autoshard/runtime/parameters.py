"""The parameters of the user's function: how a call's arguments are ordered, named, static or donated."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from autoshard.errors import ArgumentError, explain

KINDS = inspect.Parameter


@final
@dataclass(frozen=True, slots=True)
class Slot:
    """One top-level argument of a call.

    Attributes:
      path: as Python would write it ("state", "args[0]", "kwargs['x']").
      slash: in slash form ("state", "args/0", "kwargs/x").
      keyword: the keyword it is handed over with, None for a positional one.
      static: whether it is a static argument.
      donate: True or False where the user said so, None where it is for autoshard to find.
    """

    path: str
    slash: str
    keyword: str | None = None
    static: bool = False
    donate: bool | None = None


@final
@dataclass(frozen=True, slots=True)
class Form:
    """How a call is written: `slots` for the positional arguments, then the keywords in `order`."""

    slots: tuple[Slot, ...]
    order: tuple[str, ...]


@final
@dataclass(frozen=True, slots=True, eq=False)
class Parameters:
    """The function's parameters with their roles.

    Attributes:
      name: of the function, for messages.
      signature: what `inspect` says.
      static: names of static parameters.
      static_positions: static positions inside *args.
      donate: names of donated parameters, None where autoshard chooses.
      donate_positions: donated positions inside *args.
    """

    name: str
    signature: inspect.Signature
    static: frozenset[str]
    static_positions: frozenset[int]
    donate: frozenset[str] | None
    donate_positions: frozenset[int]
    forms: dict[tuple[Any, ...], Form] = field(default_factory=dict[tuple[Any, ...], Form])

    def form(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Form:
        """The form of a call.

        Raises:
          TypeError: the arguments do not fit the parameters.
        """
        key = (len(args), *kwargs)
        found = self.forms.get(key)
        if found is None:
            found = self.forms[key] = self._form(self.signature.bind(*args, **kwargs), len(args))
        return found

    def _form(self, bound: inspect.BoundArguments, positional: int) -> Form:
        slots: list[Slot] = []
        order: list[str] = []
        gap = False
        for name, parameter in self.signature.parameters.items():
            if name not in bound.arguments:
                gap = gap or parameter.kind in (KINDS.POSITIONAL_ONLY, KINDS.POSITIONAL_OR_KEYWORD)
                continue
            value = bound.arguments[name]
            if parameter.kind is KINDS.VAR_POSITIONAL:
                for i in range(len(value)):
                    slots.append(self._slot(f"{name}[{i}]", f"{name}/{i}", name, None, len(slots)))
            elif parameter.kind is KINDS.VAR_KEYWORD:
                for key in sorted(value):
                    order.append(key)
                    slots.append(self._slot(f"{name}[{key!r}]", f"{name}/{key}", key, key, -1))
            else:
                if len(slots) >= positional:
                    order.append(name)
                keyword = name if gap or parameter.kind is KINDS.KEYWORD_ONLY else None
                slots.append(self._slot(name, name, name, keyword, -1))
        return Form(tuple(slots), tuple(order))

    def _slot(self, path: str, slash: str, name: str, keyword: str | None, position: int) -> Slot:
        static = name in self.static or position in self.static_positions
        donate = None if self.donate is None else name in self.donate or position in self.donate_positions
        return Slot(path, slash, keyword, static, donate)


def read_parameters(
    fun: Callable[..., Any],
    static_argnums: Any,
    static_argnames: Any,
    donate_argnums: Any,
) -> Parameters:
    """The parameters of `fun`, with the options checked against them.

    Raises:
      ArgumentError: an index or name that the function does not have, or one both static and donated.
    """
    name = getattr(fun, "__name__", type(fun).__name__)
    try:
        signature = inspect.signature(fun)
    except (TypeError, ValueError):
        star = [KINDS("args", KINDS.VAR_POSITIONAL), KINDS("kwargs", KINDS.VAR_KEYWORD)]
        signature = inspect.Signature(star)
    positional = [
        p.name for p in signature.parameters.values() if p.kind in (KINDS.POSITIONAL_ONLY, KINDS.POSITIONAL_OR_KEYWORD)
    ]
    star_args = any(p.kind is KINDS.VAR_POSITIONAL for p in signature.parameters.values())
    static, static_positions = _by_index(
        "static_argnums", () if static_argnums is None else static_argnums, positional, star_args, name
    )
    if static_argnames is not None:
        static |= _by_name(static_argnames, signature, name)
    donate: frozenset[str] | None = None
    donate_positions: frozenset[int] = frozenset()
    if donate_argnums is not None:
        donate, donate_positions = _by_index("donate_argnums", donate_argnums, positional, star_args, name)
    both = sorted((donate or frozenset()) & static) + sorted(map(str, donate_positions & static_positions))
    if both:
        raise ArgumentError(
            explain(
                f"argument {both[0]!r} of {name} is both static and donated",
                "a static argument to hold no arrays, so that nothing of it can be donated",
                "leave it out of static_argnums/static_argnames or out of donate_argnums",
            )
        )
    return Parameters(name, signature, static, static_positions, donate, donate_positions)


def _by_index(
    option: str, indices: Any, positional: Sequence[str], star_args: bool, fun_name: str
) -> tuple[frozenset[str], frozenset[int]]:
    names: set[str] = set()
    positions: set[int] = set()
    given: Any = indices if isinstance(indices, Iterable) and not isinstance(indices, str) else (indices,)
    for index in given:
        try:
            number = operator.index(index)
        except TypeError:
            raise ArgumentError(
                explain(
                    f"{option}={indices!r}",
                    "an int or a sequence of ints, positions of arguments",
                    "use static_argnames for names" if option == "static_argnums" else "give positions, 0 is the first",
                )
            ) from None
        number += len(positional) if number < 0 else 0
        if 0 <= number < len(positional):
            names.add(positional[number])
        elif number >= len(positional) and star_args:
            positions.add(number)
        else:
            raise ArgumentError(
                explain(
                    f"{option}={indices!r}, but {fun_name} has {len(positional)} positional parameters "
                    f"({', '.join(positional) or 'none'})",
                    f"positions from {-len(positional)} to {len(positional) - 1}",
                    "correct the position"
                    + (", or name keyword-only parameters in static_argnames" if option == "static_argnums" else ""),
                )
            )
    return frozenset(names), frozenset(positions)


def _by_name(names: Any, signature: inspect.Signature, fun_name: str) -> frozenset[str]:
    given: tuple[Any, ...] = tuple(names) if isinstance(names, list | tuple | set | frozenset) else (names,)
    known = {p.name for p in signature.parameters.values() if p.kind not in (KINDS.VAR_POSITIONAL, KINDS.VAR_KEYWORD)}
    anything = any(p.kind is KINDS.VAR_KEYWORD for p in signature.parameters.values())
    for each in given:
        if not isinstance(each, str):
            raise ArgumentError(
                explain(
                    f"static_argnames={names!r}",
                    "a parameter name or a sequence of names",
                    "use static_argnums for positions",
                )
            )
        if each not in known and not anything:
            raise ArgumentError(
                explain(
                    f"static_argnames names {each!r}, but the parameters of {fun_name} are "
                    f"{', '.join(sorted(known)) or 'none'}",
                    "names of parameters",
                    "correct the name",
                )
            )
    return frozenset(given)
