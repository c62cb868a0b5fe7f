"""All factor rules: importing this registers them."""

from __future__ import annotations

from autoshard.ir import (
    rules_attention,
    rules_control,
    rules_elementwise,
    rules_index,
    rules_linear,
    rules_other,
    rules_reduce,
    rules_shape,
)
from autoshard.ir.rule_registry import factor_rule as factor_rule
from autoshard.ir.rule_registry import register_rule as register_rule
from autoshard.ir.rule_registry import registered as registered

FAMILIES = (
    rules_attention,
    rules_control,
    rules_elementwise,
    rules_index,
    rules_linear,
    rules_other,
    rules_reduce,
    rules_shape,
)
"""The modules that register rules."""
