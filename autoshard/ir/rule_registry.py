"""Where factor rules are registered and looked up, by primitive name.

A primitive without a rule gets Shardy's (`shardy.py`); one that Shardy does not know either is an error. Nothing is
ever replicated because nobody knew better.
"""

from __future__ import annotations

from collections.abc import Callable

from autoshard.errors import ArgumentError, explain
from autoshard.ir.factors import FactorRule
from autoshard.ir.graph import Apply
from autoshard.ir.shardy import shardy_rule

Rule = Callable[[Apply], FactorRule]
"""Makes the rule of one equation from its name, parameters and abstract values."""

_RULES: dict[str, Rule] = {}


def factor_rule(equation: Apply) -> FactorRule:
    """The factor rule of an equation.

    Raises:
      UnknownPrimitiveError: neither a registered rule nor one of Shardy's.
    """
    rule = _RULES.get(equation.name)
    return shardy_rule(equation) if rule is None else rule(equation)


def register_rule(*names: str, replace: bool = False) -> Callable[[Rule], Rule]:
    """Registers a factor rule for primitives, as a decorator.

    The function gets the equation and returns its rule; `FactorBuilder` makes that short:

        @register_rule("my_scale")
        def _scale(equation):  # ([i,j],[])->([i,j])
            builder = FactorBuilder(equation)
            for dim in range(2):
                builder.factor({0: dim, builder.result(): dim})
            return builder.build()

    Args:
      names: names of the primitives.
      replace: whether a rule that exists is replaced.

    Raises:
      ArgumentError: a name has a rule already.
    """

    def register(rule: Rule) -> Rule:
        for name in names:
            if name in _RULES and not replace:
                raise ArgumentError(
                    explain(
                        f"a factor rule for the primitive '{name}' was registered twice",
                        "one rule a primitive",
                        "pass replace=True to register_rule to put yours in its place",
                    )
                )
            _RULES[name] = rule
        return rule

    return register


def words(text: str) -> tuple[str, ...]:
    """Names written as one line of text."""
    return tuple(text.split())


def registered() -> frozenset[str]:
    """Names of the primitives with a registered rule."""
    return frozenset(_RULES)
