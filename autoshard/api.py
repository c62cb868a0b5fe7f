"""The decorator: `jax.jit` for a cluster.

    @autoshard
    def train_step(state, batch): ...

A call goes down one of two roads:

    quick   the last signature again: straight into its compiled program, whose dispatch checks the signature
    slow    anything else: bind, plan or look up, move arrays to their planned places, compile, run

Under an outer transformation (jit, grad, vmap, eval_shape) with traced arguments the undecorated function is called:
the outer program decides. Where that program will run, a warning says so once.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import threading
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, final, overload

import jax

from autoshard import jax_compat
from autoshard.dump import Dumper, dump_folder
from autoshard.errors import ArgumentError, AutoshardWarning, PlanError, explain
from autoshard.plan import Plan
from autoshard.runtime import (
    SEARCH,
    Call,
    Compiled,
    Library,
    MakePlan,
    NewSignature,
    Options,
    Parameters,
    Planned,
    agreed,
    bind,
    build,
    build_stages,
    check_options,
    emit,
    find_target,
    fitting,
    has_tracer,
    initialise,
    learned_time,
    lower_plain,
    place,
    plan_call,
    read_parameters,
    running_mesh,
    settle,
    sharding_trees,
    structs_of,
)

DUMP_VARIABLE = "AUTOSHARD_DUMP_DIR"
REFUSED = (TypeError, ValueError, RuntimeError)
"""What jax.jit raises for arguments that lie elsewhere, are no arrays, or share a donated buffer."""


outside_traces = jax_compat.outside_traces


def _refuse(*_: Any) -> Any:
    raise NewSignature


PARSED: Final = {"budget": "budget_s"}
"""Options by another name where they have been read."""


@final
class Step:
    """A decorated step: call it like the function it wraps.

    Attributes:
      __wrapped__: the undecorated function.
    """

    __wrapped__: Callable[..., Any]
    __name__: str

    def __init__(
        self, fun: Callable[..., Any], parameters: Parameters, options: Options, search: MakePlan = SEARCH
    ) -> None:
        functools.update_wrapper(self, fun)
        self.__wrapped__ = fun
        self.__name__ = parameters.name
        self._parameters: Final = parameters
        self._options: Final = options
        self._search: Final = search
        self._lock: Final = threading.RLock()
        self._dumps = 0
        self._warned = False
        self._reset()

    def with_options(self, **options: Any) -> Step:
        """The same step with some options of `autoshard` changed, those of its plans; nothing planned is taken over.

        Raises:
          ArgumentError, MeshError: as `autoshard`; static and donated arguments stay what they are.
        """
        fixed = sorted({"plan", "static_argnums", "static_argnames", "donate_argnums"}.intersection(options))
        if fixed:
            raise ArgumentError(
                explain(
                    f"{fixed[0]} for {self.__name__}, which is decorated already",
                    "options of how a step is planned",
                    "decorate its __wrapped__ with it, or load a plan with .load(...)",
                )
            )
        around = {} if "stages" in options else {"stages": self._options.stages}
        made = autoshard(self.__wrapped__, **around, **options)._options
        names = [PARSED.get(name, name) for name in options]
        changed = dataclasses.replace(self._options, **{name: getattr(made, name) for name in names})
        return Step(self.__wrapped__, self._parameters, changed, self._search)

    def _reset(self) -> None:
        self._planned: dict[Any, Planned] = {}
        self._compiled: dict[Any, Compiled] = {}
        self._loaded: list[Plan] = []
        self._dumpers: dict[Any, Dumper] = {}
        self._forget_last()

    def _forget_last(self) -> None:
        self._last: Callable[..., Any] = _refuse
        self._last_compiled: Compiled | None = None
        self._last_count = -1
        # (number of positional arguments, *keywords) to the keywords in slot order, () where they stand in it
        self._last_forms: dict[tuple[Any, ...], tuple[str, ...]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step; plans and compiles first where the signature is new.

        Raises:
          TypeError: the arguments do not fit the function's parameters.
          AutoshardError: the step cannot be planned or does not run here; the state is untouched.
        """
        refusal: Exception | None = None
        if outside_traces():
            try:
                if kwargs:
                    order = self._last_forms.get((len(args), *kwargs))
                    if order == ():
                        return self._last(*args, *kwargs.values())
                    if order is not None:
                        return self._last(*args, *[kwargs[name] for name in order])
                elif len(args) == self._last_count:
                    return self._last(*args)
            except NewSignature:
                pass
            except REFUSED as error:
                refusal = error
        return self._slow(args, kwargs, refusal)

    def _slow(self, args: tuple[Any, ...], kwargs: dict[str, Any], refusal: Exception | None) -> Any:
        if not outside_traces() and has_tracer((args, kwargs)):
            self._warn_unplanned()
            return self.__wrapped__(*args, **kwargs)
        call = bind(self._parameters, args, kwargs)
        if call.abstract is not None:
            raise ArgumentError(
                explain(
                    f"{call.abstract} is a jax.ShapeDtypeStruct",
                    "arrays with data where the step runs",
                    f"call {self.__name__}.plan(...) or .lower(...) with shapes, or pass arrays",
                )
            )
        known = self._last_compiled
        compiled = self._compile(call)
        flat = settle(call, compiled)
        if refusal is not None and compiled is known:
            flat = self._retry(call, compiled, flat, refusal)
        result = compiled.run_flat(flat, call.references)
        self._remember(compiled, len(args), kwargs)
        return result

    def _retry(self, call: Call, compiled: Compiled, flat: tuple[Any, ...], refusal: Exception) -> tuple[Any, ...]:
        """Arrays with which a call that was refused may be tried again; raises the refusal if nothing can be done."""
        if "donate" in str(refusal):
            return settle(call, compiled, copy_donated=True)
        if all(new is old for new, old in zip(flat, call.flat, strict=True)):
            raise refusal
        return flat

    def _remember(self, compiled: Compiled, count: int, kwargs: Mapping[str, Any]) -> None:
        """Makes this the program of the quick road, for calls written like this one."""
        if self._last_compiled is not compiled:
            self._forget_last()
            self._last, self._last_compiled = compiled.run, compiled
        form = self._parameters.forms[count, *kwargs]
        if form.slots != compiled.planned.template.slots:
            return
        if kwargs:
            order = () if form.order == tuple(kwargs) else form.order
            self._last_forms = {**self._last_forms, (count, *kwargs): order}
        else:
            self._last_count = count

    def _key(self, call: Call) -> Any:
        return call.key, jax_compat.ambient_mesh()

    def _plan(self, call: Call) -> Planned:
        key = self._key(call)
        with self._lock:
            found = self._planned.pop(key, None)
            if found is None:

                def make(library: Library) -> Planned:
                    return plan_call(
                        self.__wrapped__,
                        self.__name__,
                        call,
                        self._options,
                        find_target(self._options),
                        library,
                        self._search,
                        self._dumper(key),
                    )

                found = make(Library(tuple(self._planned.values()), tuple(self._loaded)))
                found = agreed(found, self.__name__, self._options, lambda plan: make(Library((), (plan,))))
                if self._options.learned_model is not None:
                    found = learned_time(found, self._options.learned_model, self.__name__)
            self._planned[key] = found
        return found

    def _compile(self, call: Call) -> Compiled:
        key = self._key(call)
        with self._lock:
            found = self._compiled.get(key)
            return self._build(key, self._plan(call)) if found is None else found

    def _build(self, key: Any, planned: Planned) -> Compiled:
        dumper = self._dumpers.get(key)

        def make(planned: Planned) -> Compiled:
            mesh = running_mesh(planned.target, planned.plan.mesh)
            if planned.staged is not None:
                return build_stages(planned, planned.staged, mesh, self.__name__, dumper)
            return build(planned, mesh, emit(planned.graph, planned.plan, mesh, dumper), self.__name__)

        compiled = make(planned) if planned.staged is not None else fitting(planned, make)
        if dumper is not None and planned.staged is None:
            dumper("stablehlo-before", lower_plain(self.__wrapped__, planned).as_text())
            dumper("stablehlo-after", compiled.lower(structs_of(planned.avals), None).as_text())
        self._planned[key] = compiled.planned
        self._compiled[key] = compiled
        return compiled

    def _dumper(self, key: Any) -> Dumper | None:
        folder = self._options.dump_dir
        if folder is None:
            return None
        self._dumps += 1
        dumper = self._dumpers[key] = Dumper(dump_folder(folder, self.__name__, self._dumps))
        return dumper

    def __deepcopy__(self, memo: dict[int, Any]) -> Step:
        """Itself, as of a jitted function: what was compiled is shared."""
        return self

    def _warn_unplanned(self) -> None:
        if self._warned or jax_compat.only_shapes():
            return
        self._warned = True
        warnings.warn(
            f"{self.__name__} was called inside another JAX transformation (jit, grad, vmap, ...): there it is the "
            "undecorated function, neither planned nor sharded. Decorate the outermost function instead.",
            AutoshardWarning,
            stacklevel=4,
        )

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan for these arguments; needs no devices.

        Args:
          *args: arrays, or `jax.ShapeDtypeStruct`s in their place; NNX objects, or abstract ones of `nnx.eval_shape`.
          **kwargs: the same by name.
        """
        return self._plan(bind(self._parameters, args, kwargs)).plan

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """The planned program for these arguments, lowered as by `jax.jit(...).lower`; shapes will do."""
        call = bind(self._parameters, args, kwargs)
        return self._compile(call).lower(structs_of(call.avals), None)

    def shardings(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """(in_shardings, out_shardings) planned for these arguments, as trees like the arguments and the result.

        in_shardings is a tuple of the positional arguments without static ones, and (tuple, dict) if there are keyword
        arguments that cannot be passed by position. Leaves that are not arrays have None.
        """
        return sharding_trees(self._compile(bind(self._parameters, args, kwargs)))

    def init(self, make_state: Any, *args: Any, **kwargs: Any) -> Any:
        """What `make_state(*args, **kwargs)` returns, made sharded as planned: never whole on one device.

        Args:
          make_state: returns state that the step takes (an argument, several of them, or parts), NNX objects too.
          *args: its arguments.
          **kwargs: the same by name.

        Raises:
          ArgumentError: nothing has been planned yet, or the state is not what planned steps take.
        """
        if not callable(make_state):
            raise ArgumentError(
                explain(
                    f"init was given a {type(make_state).__name__}",
                    "a function that makes the state",
                    f"write {self.__name__}.init(make_state, key); to move a state that exists use .place(state)",
                )
            )
        return initialise(make_state, args, kwargs, self._known("init"))

    def place(self, *values: Any) -> Any:
        """The values moved to the shardings planned for them: one value, or a tuple for several.

        NNX objects are updated in place and returned.

        Raises:
          ArgumentError: nothing has been planned yet, or a value is not part of the step's arguments.
          MeshError: an array lies on devices that the plan does not have.
        """
        placed = place(self._known("place")[0], values)
        return placed[0] if len(placed) == 1 else tuple(placed)

    def _known(self, method: str) -> list[Compiled]:
        """All planned signatures as programs, latest first."""
        with self._lock:
            if not self._planned:
                raise ArgumentError(
                    explain(
                        f"{self.__name__}.{method} was called before anything was planned",
                        "a plan, which says where the state goes",
                        f"call {self.__name__}.plan(state, batch) first; shapes from jax.eval_shape will do",
                    )
                )
            for key, planned in self._planned.items():
                if key not in self._compiled:
                    self._build(key, planned)
            return [self._compiled[key] for key in reversed(self._planned)]

    def load(self, plan: Any) -> None:
        """Uses a plan made before (or the JSON file of one) instead of a search, for the program it belongs to.

        Raises:
          PlanError: not a plan. A plan of another program is refused when the step is planned or called.
        """
        if isinstance(plan, str | Path):
            try:
                plan = Plan.from_json(Path(plan).read_text())
            except OSError as error:
                raise PlanError(
                    explain(f"{plan}: {error}", "the path of a file that Plan.to_json made", "check the path")
                ) from error
        if not isinstance(plan, Plan):
            raise PlanError(
                explain(f"load was given a {type(plan).__name__}", "a Plan or the path of a file", "see Plan.from_json")
            )
        with self._lock:
            loaded = [*self._loaded, plan]
            self._reset()
            self._loaded = loaded

    def clear_cache(self) -> None:
        """Forgets all plans, loaded ones too, and all compiled programs."""
        with self._lock:
            self._reset()

    def __get__(self, instance: Any, owner: type | None = None) -> Step | BoundStep:
        """As a method: the object is the first argument."""
        return self if instance is None else BoundStep(self, instance)

    def __repr__(self) -> str:
        return f"autoshard({self.__name__})"


@final
class BoundStep:
    """A decorated method of one object; everything as in `Step`, with the object as first argument."""

    def __init__(self, step: Step, instance: Any) -> None:
        self.__func__: Final = step
        self.__self__: Final = instance

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step."""
        return self.__func__(self.__self__, *args, **kwargs)

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """See `Step.plan`."""
        return self.__func__.plan(self.__self__, *args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """See `Step.lower`."""
        return self.__func__.lower(self.__self__, *args, **kwargs)

    def shardings(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """See `Step.shardings`; without the object."""
        inputs, outputs = self.__func__.shardings(self.__self__, *args, **kwargs)
        if len(inputs) == 2 and isinstance(inputs[0], tuple) and isinstance(inputs[1], dict):
            return (inputs[0][1:], inputs[1]), outputs
        return inputs[1:], outputs

    def init(self, make_state: Any, *args: Any, **kwargs: Any) -> Any:
        """See `Step.init`."""
        return self.__func__.init(make_state, *args, **kwargs)

    def place(self, *values: Any) -> Any:
        """See `Step.place`."""
        return self.__func__.place(*values)

    def load(self, plan: Any) -> None:
        """See `Step.load`."""
        self.__func__.load(plan)

    def clear_cache(self) -> None:
        """See `Step.clear_cache`."""
        self.__func__.clear_cache()


# Options are Any: what is wrong is said by `check_options` and its kin, in our words.
@overload
def autoshard(fun: Callable[..., Any], /, **options: Any) -> Step: ...
@overload
def autoshard(fun: None = None, /, **options: Any) -> Callable[[Callable[..., Any]], Step]: ...
def autoshard(
    fun: Any = None,
    /,
    *,
    mesh: Any = None,
    devices: Any = "auto",
    pins: Any = None,
    stages: Any = None,
    schedule: Any = None,
    microbatches: Any = None,
    remat: Any = None,
    static_argnums: Any = None,
    static_argnames: Any = None,
    donate_argnums: Any = None,
    memory_limit: Any = None,
    budget: Any = None,
    seed: Any = 0,
    dump_dir: Any = None,
    learned_model: Any = None,
    plan: Any = None,
    pipeline_runtime: Any = None,
    **later: Any,
) -> Step | Callable[[Callable[..., Any]], Step]:
    """Shards a step that was written for one device.

    Use it as `@autoshard`, `@autoshard(...)` or `autoshard(fun, ...)`. The step is called like the function; what is
    not an array in its arguments is static. Inside another transformation (jit, grad, vmap, eval_shape) it is the
    undecorated function.

    Args:
      fun: the step, anything `jax.jit` takes.
      mesh: None (chosen), a shape such as (2, 4), named sizes such as {"data": 2, "model": 4}, or a `jax.sharding.Mesh`
        (axes of either type).
      devices: "auto" (JAX's devices), a preset such as "h100x8", a `DeviceSpec`, a `Cluster`, or a cluster file.
      pins: shardings kept as they are, by path pattern: {"**/mlp/**/kernel": PartitionSpec(None, "model")}.
      stages: into how many stages the step is cut, to run as a pipeline on as many parts of the devices; `mesh` is then
        the mesh of one stage (a `jax.sharding.Mesh` has the stages as its first axis). None: chosen, 1 where a mesh or
        pins are given.
      schedule: of a pipeline, with `stages`: "1f1b", "gpipe", "eager-1f1b", "zb-h1", "zb-h2", an
        `autoshard.schedules.Schedule`, or a table. None: the quickest that fits of the first three.
      microbatches: into how many parts the batch is cut; gradients and metrics are summed over them, and the step
        computes what it computes whole. None: 1, or the fewest with which it fits the memory; of a pipeline 4 a
        stage, or 2 or 1 where the batch does not divide.
      remat: whether the backward pass computes parts of the forward pass again instead of keeping them. None: where the
        step does not fit the memory otherwise.
      static_argnums: positions of static arguments.
      static_argnames: names of static arguments.
      donate_argnums: positions of arguments whose buffers the step may reuse; None: state, found by matching outputs
        to inputs; (): none.
      memory_limit: bytes on one device, a number or text such as "24GiB"; None: what the device has.
      budget: seconds for the search.
      seed: of the search.
      dump_dir: a folder for the IR after each pass; also the environment variable AUTOSHARD_DUMP_DIR.
      learned_model: a folder that `autoshard learn` wrote on this machine. Plans for CPU devices are then compiled when
        they are made, and their step time is the model's where its validation beats the analytic one; `plan.why` says
        that it was used, or why not.
      plan: a plan made before, or its JSON file, used instead of a search.
      pipeline_runtime: of a pipeline: "mpmd", each stage's programs on its own devices, at their own pace;
        "one-program", one program for all stages, which have to be alike. None: "mpmd", or that of `plan`.
      **later: sync, period, delay, merge, warmup_steps: not available yet, only
        None and the values of a step on one mesh are taken.

    Raises:
      ArgumentError: an option is wrong; says which, what was expected and what to do.
      MeshError, PlanError: `mesh` or `plan` is wrong.

    When it is planned, a step whose examples depend on each other across microbatches is a `MicrobatchError`.
    """
    options = check_options(
        mesh=mesh,
        devices=devices,
        pins=pins,
        stages=stages,
        schedule=schedule,
        microbatches=microbatches,
        remat=remat,
        memory_limit=memory_limit,
        budget=budget,
        seed=seed,
        dump_dir=os.environ.get(DUMP_VARIABLE) if dump_dir is None else dump_dir,
        learned_model=learned_model,
        later=later,
        pipeline_runtime=pipeline_runtime,
    )

    def decorate(function: Any) -> Step:
        if isinstance(function, Step):
            raise ArgumentError(
                explain(
                    f"{function!r} is decorated already", "an undecorated step", "use its __wrapped__, or decorate once"
                )
            )
        if not callable(function):  # a classmethod object is not, for instance
            raise ArgumentError(
                explain(
                    f"autoshard was given a {type(function).__name__} to decorate",
                    "a function",
                    "write @autoshard, @autoshard(...) or autoshard(fun, ...); options go by keyword",
                )
            )
        step = Step(function, read_parameters(function, static_argnums, static_argnames, donate_argnums), options)
        if plan is not None:
            step.load(plan)
        return step

    return decorate if fun is None else decorate(fun)
