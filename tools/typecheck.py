"""The type checker that tests put on every function and dataclass of autoshard (pytest's --jaxtyping-packages)."""

from __future__ import annotations

from beartype import BeartypeConf, beartype

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))
"""beartype, with an int where a float is asked for, as in pyright."""
