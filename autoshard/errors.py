"""Every error autoshard raises on purpose.

One tree, so that `except AutoshardError` catches all of it. Each message says what was given, what
was expected and what to do (STYLE 25); `explain` builds that sentence so that no part is forgotten.
Errors that a Python or JAX user would expect to be a `TypeError`, `ValueError` or `KeyError` are
one as well.
"""

from __future__ import annotations

from typing import final


class AutoshardError(Exception):
    """Base of all errors autoshard raises on purpose."""


class AutoshardWarning(UserWarning):
    """Something a user would want to know that is no error."""


@final
class ArgumentError(AutoshardError, TypeError, ValueError):
    """An option or argument of the decorator, or of a step's call, is wrong."""


@final
class MeshError(AutoshardError, ValueError):
    """A mesh does not fit the devices, or two meshes contradict each other."""


@final
class ClusterError(AutoshardError, ValueError):
    """A preset, cluster file or device figure is wrong."""


@final
class PinError(AutoshardError, ValueError):
    """A pin or a user's sharding constraint cannot hold."""


@final
class TraceError(AutoshardError, TypeError):
    """The step could not be traced."""


@final
class UnknownPrimitiveError(AutoshardError, NotImplementedError):
    """A primitive without a factor rule."""


@final
class VerifyError(AutoshardError):
    """The graph broke one of its own rules (a defect of a pass, never of the user's program)."""


@final
class MicrobatchError(AutoshardError, ValueError):
    """A step cannot be cut into these microbatches."""


@final
class InfeasibleError(AutoshardError):
    """No plan meets the memory limit or the pins.

    Attributes:
      need_bytes: least memory of a device that a plan was found for, None if it is not known.
    """

    def __init__(self, message: str, need_bytes: int | None = None) -> None:
        super().__init__(message)
        self.need_bytes = need_bytes


@final
class PlanError(AutoshardError, ValueError):
    """A plan file is malformed, stale, or belongs to another program."""


@final
class InstanceError(AutoshardError, ValueError):
    """A benchmark instance is malformed."""


@final
class CompileError(AutoshardError, RuntimeError):
    """The XLA compiler could not be used, or refused the program."""


@final
class ProcessLostError(AutoshardError, RuntimeError):
    """A process of a pipelined step has died or cannot be reached.

    Attributes:
      processes: their numbers.
    """

    def __init__(self, message: str, processes: tuple[int, ...]) -> None:
        super().__init__(message)
        self.processes = processes


def explain(given: str, expected: str, todo: str) -> str:
    """One message from its three parts.

    Args:
      given: what was given, a sentence without the final stop.
      expected: what was expected.
      todo: what to do about it.
    """
    return f"{given}.\n  expected: {expected}.\n  to do: {todo}."
