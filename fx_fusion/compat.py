"""Every place where torch's releases differ, 2.11 to 2.15, and every use of its private names.

The rest of the package asks here and stays free of version branches.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch._guards import TracingContext
from torch._inductor.custom_graph_pass import CustomGraphPass

if TYPE_CHECKING:
    from torch._inductor.custom_graph_pass import (
        CustomInferenceAwareGraphPass as InferenceAwarePass,
    )
else:
    try:  # from 2.12 on
        from torch._inductor.custom_graph_pass import (
            CustomInferenceAwareGraphPass as InferenceAwarePass,
        )
    except ImportError:
        InferenceAwarePass = CustomGraphPass

__all__ = [
    "NEWEST",
    "OLDEST",
    "POST_PASS",
    "RUN_PASSES",
    "CustomGraphPass",
    "InferenceAwarePass",
    "all_group_sizes",
    "ambient_post_pass",
    "caching_is_on",
    "capture_with_inductor",
    "compile_scope",
    "compile_with_inductor",
    "custom_passes",
    "device_archs",
    "graph_kind",
    "group_world_size",
    "inductor_counters",
    "inductor_option_names",
    "installed_backend",
    "is_inference_aware",
    "is_tracing",
    "mode_names",
    "mode_options",
    "package_metadata",
    "register_in_place",
    "registered_groups",
    "reset_inductor",
    "restart_group_names",
    "run_post_grad_passes",
    "runs_post_grad_passes",
    "versions",
]

#: The releases of torch this package knows: from the first on, up to the last.
OLDEST: Final = (2, 11)
NEWEST: Final = (2, 15)

#: Inductor's config slot for custom passes over the post-grad graph, after its own.
POST_PASS: Final = "post_grad_custom_post_pass"

#: Inductor's option that switches that stage, and with it our pass, on and off.
RUN_PASSES: Final = "use_post_grad_passes"

#: The slots in which a pass without a uuid keeps a graph out of the cache.
_CACHED_SLOTS: Final = (
    "joint_custom_pre_pass",
    "joint_custom_post_pass",
    "post_grad_custom_pre_pass",
    POST_PASS,
)


def is_inference_aware(custom_pass: object) -> bool:
    """True if Inductor calls this pass as `pass(graph, is_inference=...)`; never in 2.11."""
    return InferenceAwarePass is not CustomGraphPass and isinstance(
        custom_pass, InferenceAwarePass
    )


def versions() -> tuple[str, str]:
    """The versions of torch and triton; "" for triton where there is none."""
    try:
        import triton

        triton_version = str(triton.__version__)
    except ImportError:
        triton_version = ""
    return str(torch.__version__), triton_version


def device_archs() -> tuple[str, ...]:
    """The architecture of every GPU this process sees: "sm_90", "gfx942"; none on a CPU."""
    if not torch.cuda.is_available():
        return ()
    archs = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        if torch.version.hip:
            archs.append(str(properties.gcnArchName))
        else:
            archs.append(f"sm_{properties.major}{properties.minor}")
    return tuple(archs)


def group_world_size(name: str) -> int | None:
    """The number of ranks in the group of this name, None if there is none. No collective."""
    if not dist.is_available():
        return None
    # Some releases type the name as a NewType of str that others don't have.
    c10d: Any = importlib.import_module("torch._C._distributed_c10d")
    try:
        return int(c10d._resolve_process_group(name).size())
    except (RuntimeError, ValueError, LookupError):
        return None


def all_group_sizes() -> dict[str, int]:
    """Name to number of ranks, for every process group of this process. No collective."""
    if not dist.is_available() or not dist.is_initialized():
        return {}
    from torch.distributed.distributed_c10d import _world

    return {str(name): int(group.size()) for group, name in _world.pg_names.items()}


def registered_groups() -> dict[Any, Any]:
    """The dictionary whose keys are the process groups that exist; destroyed ones leave it.

    It is torch's own, so it may be kept and looked at later.
    """
    from torch.distributed.distributed_c10d import _world

    groups: dict[Any, Any] = _world.pg_map
    return groups


def restart_group_names() -> None:
    """Name process groups from "0" on again, where there is none.

    torch does so when the default group is destroyed, but not when making it failed: the next
    one would be called "1".
    """
    from torch.distributed.distributed_c10d import _world

    _world.group_count = 0


def register_in_place(
    op: object, in_place: object, position: int, check: Callable[[torch.fx.Node], bool]
) -> bool:
    """Let Inductor put an op that mutates an argument in place of one that doesn't.

    It does so where nobody reads the argument, or memory that it shares, any more.

    Args:
        op: The functional op; its argument must never be None, at which Inductor would fail.
        in_place: The op with the same arguments that mutates the argument.
        position: The argument's position.
        check: What a node must satisfy beside that.

    Returns:
        False where this release of torch has no such table, so that nothing is in place.
    """
    try:
        from torch._inductor.fx_passes.reinplace import InplaceableOp, inplaceable_ops

        table: dict[Any, Any] = inplaceable_ops
        table[op] = InplaceableOp(in_place, position, extra_check=check)  # type: ignore[arg-type]
    except (ImportError, TypeError):
        return False
    return True


def compile_scope() -> object | None:
    """What stays the same object through one compilation, its later backward included.

    A backward graph may be compiled at the first `.backward()`, in a thread of autograd's;
    torch restores the context of the forward there. None outside a compilation.
    """
    return TracingContext.try_get()


def graph_kind(is_inference: bool | None = None) -> str | None:
    """Which graph AOTAutograd compiles just now: "inference", "forward" or "backward".

    Args:
        is_inference: What Inductor said, None where it says nothing (2.11).

    Returns:
        None where it can't be told, as outside of AOTAutograd.
    """
    context = TracingContext.try_get()
    names = context.aot_graph_name if context is not None else None
    if not names:
        with contextlib.suppress(ImportError):
            from torch._functorch._aot_autograd.logging_utils import (
                get_aot_compilation_context,
            )

            names = get_aot_compilation_context()[0]
    # One entry such as "0_backward".
    kind = names[-1].rpartition("_")[2] if names else ""
    if is_inference or kind == "inference":
        return "inference"
    return kind if kind in ("forward", "backward") else None


def inductor_counters() -> Counter[str]:
    """Inductor's counters; what one compile adds to them is stored and replayed by its cache."""
    from torch._dynamo.utils import counters

    return counters["inductor"]


def package_metadata() -> tuple[dict[str, str], object] | None:
    """What AOTInductor writes beside the code of the package it is compiling; None elsewhere.

    It is one dict for the whole process, into which torch itself writes too, so whoever adds to
    it has to take that out again when the compilation is over.

    Returns:
        The dict, and an object that lives as long as the compilation.
    """
    from torch._guards import CompileContext
    from torch._inductor import config
    from torch._inductor.virtualized import V

    context = CompileContext.try_get()
    if not V.aot_compilation or context is None:
        return None
    return config.aot_inductor.metadata, context


def inductor_option_names() -> tuple[str, ...]:
    """Inductor's config keys, with underscores."""
    from torch._inductor import list_options

    return tuple(list_options())


def mode_names() -> tuple[str, ...]:
    """The names `mode` may have."""
    from torch._inductor import list_mode_options

    return tuple(list_mode_options())


def mode_options(mode: str) -> dict[str, Any]:
    """The Inductor options that a valid mode stands for."""
    from torch._inductor import list_mode_options

    return dict(list_mode_options(mode))


def runs_post_grad_passes() -> bool:
    """Inductor's global setting of `RUN_PASSES`."""
    from torch._inductor import config

    return bool(getattr(config, RUN_PASSES))


def ambient_post_pass() -> object | None:
    """What stands in Inductor's global config slot; None if nothing."""
    from torch._inductor import config

    found: object | None = getattr(config, POST_PASS)
    return found


def custom_passes() -> Iterator[object]:
    """The custom passes of all slots that Inductor's cache looks at, as configured just now."""
    from torch._inductor import config

    for slot in _CACHED_SLOTS:
        value = getattr(config, slot, None)
        if isinstance(value, (list, tuple)):
            yield from value
        elif value is not None:
            yield value


def caching_is_on() -> bool:
    """True if Inductor would store what it compiles."""
    from torch._inductor import config

    return bool(config.fx_graph_cache or config.fx_graph_remote_cache)


def is_tracing() -> bool:
    """True if a structured trace is being written (TORCH_TRACE).

    torch installs a handler in any case, which has no folder where there is nothing to write.
    pytest adds handlers of its own to every logger, which ask for no trace.
    """
    return any(
        getattr(handler, "root_dir", "") is not None
        and not type(handler).__module__.startswith("_pytest.")
        for handler in logging.getLogger("torch.__trace").handlers
    )


def compile_with_inductor(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Mapping[str, Any],
) -> Callable[..., Any]:
    """Compile as `torch.compile(backend="inductor", options=options)` does.

    torch's own wrapper does it, so option values are checked, and everything else is treated,
    as there; its constructor takes (mode, options, dynamic) in all releases.
    """
    make_wrapper: Callable[..., Any] = torch._TorchCompileInductorWrapper
    wrapper = make_wrapper(None, dict(options), None)
    compiled: Callable[..., Any] = wrapper(gm, example_inputs)
    return compiled


def capture_with_inductor(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Mapping[str, Any],
    inner_compile: Callable[..., Callable[..., Any]],
) -> Callable[..., Any]:
    """Let Inductor do all up to the point where it compiles a graph, and call another for that.

    Args:
        gm: The graph that Dynamo captured.
        example_inputs: Its inputs.
        options: Inductor's options.
        inner_compile: Called as `inner_compile(gm, example_inputs, **kwargs)` for each graph
            that AOTAutograd makes, `is_inference` or `is_backward` being among the keywords.
            What it returns is called with one list of inputs, and must say so by an attribute
            `_boxed_call`.
    """
    from torch._inductor.compile_fx import compile_fx

    call: Callable[..., Any] = compile_fx
    compiled: Callable[..., Any] = call(
        gm, example_inputs, inner_compile=inner_compile, config_patches=dict(options)
    )
    return compiled


def run_post_grad_passes(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], is_inference: bool
) -> None:
    """Apply Inductor's post-grad passes, custom ones included, as it does when it compiles.

    The steps are those of torch/_inductor/compile_fx.py up to its code generation.
    """
    compile_fx: Any = importlib.import_module("torch._inductor.compile_fx")
    from torch._inductor.virtualized import V

    compile_fx.view_to_reshape(gm)
    with torch.no_grad():
        fake_mode = compile_fx.fake_tensor_prop(gm, example_inputs)
    compile_fx._recursive_record_original_output_strides(gm)
    with V.set_fake_mode(fake_mode), compile_fx.get_cuda_device_context(gm):
        compile_fx._recursive_post_grad_passes(gm, is_inference=is_inference)


def reset_inductor() -> None:
    """Drop the CUDA graphs of compiled code, as `torch._dynamo.reset()` does for Inductor."""
    from torch._inductor.cudagraph_trees import reset_cudagraph_trees

    reset_cudagraph_trees()


def installed_backend(name: str, function: Callable[..., Any]) -> str | Callable[..., Any]:
    """`name` where torch's registry leads it to `function`, else the function itself.

    The registered name is better: Dynamo treats unregistered callables more cautiously.
    """
    from torch._dynamo import list_backends, lookup_backend

    if name in list_backends(exclude_tags=()) and lookup_backend(name) is function:
        return name
    return function
