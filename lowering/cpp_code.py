"""What Inductor's generated C++ holds of a site: how it finds the package, and one call a site.

The code may come from a cache or a package and run in another process, so it holds no address.
It asks torch's dispatcher for one, once: the op `fx_fusion::import_fx_fusion.ops` returns the
address of what `cpp_entry` serves. Where the package isn't imported torch's message names that
op, and so the import that is missing; AOTInductor looks for it as soon as a package is loaded.

Everything of torch's is called through its stable C interface (`aoti_torch_...`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import torch
from torch._export.serde import schema
from torch._inductor import ir
from torch._inductor.virtualized import V

from fx_fusion.lowering.ops import NEEDED_IMPORT

#: The function that tells a GPU's current stream; the name is the same for CUDA and ROCm.
CURRENT_STREAM: Final = "aoti_torch_get_current_cuda_stream"

# torch leaves parts of it untyped.
_schema: Final = cast(Any, schema)
#: On a wrapper whose file has the helpers.
_MARK: Final = "fx_fusion_helpers"

#: Once a file. `FxFusionCall` is `CppCall` of csrc/cpp_entry.h.
_HELPERS: Final = r"""
#ifndef FX_FUSION_CALL
#define FX_FUSION_CALL
#include <array>
#include <atomic>
#include <cstdint>
#include <stdexcept>

namespace {

struct FxFusionCall {
  int64_t bytes;
  void** site;
  const char* description;
  int64_t rows;
  uint64_t stream;
  std::array<double, 2> numbers;
  std::array<int32_t, 2> given;
  int32_t has_stream;
  int32_t keeps_error;
  std::array<AtenTensorHandle, 10> tensors;
  AOTITorchError (*address_of)(AtenTensorHandle, void**);
  AOTITorchError (*second_of)(AtenTensorHandle, AtenTensorHandle*);
  char message[1024];
};

using FxFusionEntry = int32_t (*)(FxFusionCall*);

[[maybe_unused]] FxFusionEntry fx_fusion_entry() {
  static std::atomic<FxFusionEntry> known{nullptr};
  FxFusionEntry entry = known.load();
  if (entry != nullptr) return entry;
  StableIValue results[1] = {0};
  if (aoti_torch_call_dispatcher("@OPERATOR@", "@OVERLOAD@", results) != 0)
    throw std::runtime_error(
        "This code was compiled with fx_fusion, which isn't loaded or can't run it; import"
        " fx_fusion.ops before running it, and see standard error for what torch says.");
  entry = reinterpret_cast<FxFusionEntry>(static_cast<uintptr_t>(results[0]));
  known.store(entry);
  return entry;
}

// Run one site. True if it failed and left Python's error, which happens with keeps_error alone.
[[maybe_unused]] bool fx_fusion_call(
    void** site, const char* description, bool keeps_error, int64_t rows,
    AOTITorchError (*current_stream)(int32_t, void**), std::array<double, 2> numbers,
    std::array<int32_t, 2> given, std::array<AtenTensorHandle, 10> tensors) {
  FxFusionCall call{};
  call.bytes = sizeof(FxFusionCall);
  call.site = site;
  call.description = description;
  call.rows = rows;
  call.numbers = numbers;
  call.given = given;
  call.keeps_error = keeps_error;
  call.tensors = tensors;
  call.address_of = aoti_torch_get_data_ptr;
  call.second_of = aoti_torch_new_tensor_handle;
  if (current_stream != nullptr) {
    int32_t device = 0;
    void* stream = nullptr;
    if (aoti_torch_get_device_index(tensors[0], &device) != 0 ||
        current_stream(device, &stream) != 0)
      throw std::runtime_error("fx_fusion: torch told no current stream; see standard error");
    call.stream = reinterpret_cast<uintptr_t>(stream);
    call.has_stream = 1;
  }
  const int32_t status = fx_fusion_entry()(&call);
  if (status == 1) return true;
  if (status != 0)
    throw std::runtime_error(
        call.message[0] != 0
            ? call.message
            : "This code was compiled with another version of fx_fusion; compile it again.");
  return false;
}

}  // namespace
#endif
"""


def prepare(wrapper: Any) -> None:
    """Put into the file what all its calls need, and have a package's loading check for it."""
    operator, overload = NEEDED_IMPORT.split(".")
    text = _HELPERS.replace("@OPERATOR@", operator).replace("@OVERLOAD@", overload)
    if not getattr(wrapper, _MARK, False):
        wrapper.header.splice(text)
        setattr(wrapper, _MARK, True)
    nodes = V.extern_kernel_nodes if V.graph.aot_mode else None
    if nodes is not None and all(node.name != NEEDED_IMPORT for node in nodes):
        nodes.append(_node())


def _node() -> Any:
    """A call of the op; AOTInductor looks for its op as soon as it loads a package."""
    output = _schema.Argument.create(as_int=0)
    call = _schema.Node(target=NEEDED_IMPORT, inputs=[], outputs=[output], metadata={})
    return ir.ExternKernelNode(name=NEEDED_IMPORT, node=call)


def describe(
    constants: Mapping[str, Any],
    tensors: Mapping[str, Any],
    results: Sequence[Any],
    on_gpu: bool,
) -> str:
    """What a site is made of, as `cpp_entry.site_of` reads it: two alike may share one.

    Args:
        constants: Every argument of the op that isn't a tensor.
        tensors: Inductor's tensors by the op's names.
        results: Inductor's result buffers; None where not wanted.
        on_gpu: The site is called with a stream.
    """
    given = [[name, str(tensor.get_dtype())] for name, tensor in sorted(tensors.items())]
    plain = {
        name: str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
        for name, value in sorted(constants.items())
    }
    text = json.dumps(
        {
            "on_gpu": on_gpu,
            "constants": plain,
            # a site binds these at its first call
            "tensors": given,
            "hidden_size": str(tensors["x"].get_size()[-1]),
            "results": [None if r is None else str(r.get_dtype()) for r in results],
        }
    )
    return text.replace("'", r"\u0027")  # the code may stand between three of them


def call(
    name: str,
    description: str,
    rows: str,
    numbers: Sequence[str | None],
    tensors: Sequence[str | None],
    *,
    on_gpu: bool,
    is_package: bool,
) -> str:
    """One call of a site, one line.

    Args:
        name: Of the site, unique in the file.
        description: Of `describe`.
        rows: The number of rows, C++.
        numbers: eps and scale as C++ numbers, None for the site's own.
        tensors: Handles in the kernels' order: x, residual, weight, bias, eps, scale, norm,
            hidden state, reduced, rstd; None for an absent one.
        on_gpu: Call with the current stream.
        is_package: The code is AOTInductor's, which can't hand on an error of Python's.
    """
    values = ", ".join(f"double({number})" if number else "0.0" for number in numbers)
    given = ", ".join("1" if number else "0" for number in numbers)
    handles = ", ".join(handle or "nullptr" for handle in tensors)
    arguments = (
        f"&{name}",
        f'R"fx_fusion({description})fx_fusion"',
        "false" if is_package else "true",
        rows,
        CURRENT_STREAM if on_gpu else "nullptr",
        f"std::array<double, 2>{{{values}}}",
        f"std::array<int32_t, 2>{{{given}}}",
        f"std::array<AtenTensorHandle, 10>{{{handles}}}",
    )
    made = f"fx_fusion_call({', '.join(arguments)})"
    # an error of Python's is raised by who called the code
    made = f"{made};" if is_package else f"if ({made}) return;"
    return f"{{ static void* {name} = nullptr; {made} }}"
