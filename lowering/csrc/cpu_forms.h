// Rows of the usual forms compiled with their dtypes as constants, any other with them at run time.
//
// Usual is: one dtype throughout, a residual, a weight, no bias, no scale. In front of the weight
// the norm is either rounded (Hugging Face's modules) or not (torch.nn.RMSNorm). Both ways run
// the same lines of cpu_site.h, so a form gives the same bits whether it is listed here or not.
#pragma once

#include "cpu_site.h"

#include <cstring>

namespace fx_fusion {

using RowFunction =
    void (*)(const Call&, const void* const* parts, int world_size, int64_t row, float* scratch);

constexpr Form usual_form(int32_t dtype, int32_t norm_dtype) {
  return {
      .has_bias = 0,
      .has_scale = 0,
      .has_residual = 1,
      .x_dtype = dtype,
      .residual_dtype = dtype,
      .weight_dtype = dtype,
      .bias_dtype = 0,
      .cast_dtype = dtype,
      .bias_out_dtype = dtype,
      .hidden_dtype = dtype,
      .norm_dtype = norm_dtype,
      .product_dtype = norm_dtype,
      .out_dtype = dtype,
      .weight_form = kWeight,
      .reciprocal = kRsqrt,
  };
}

template <int32_t kDtype, int32_t kNormDtype>
void usual_row(
    const Call& call, const void* const* parts, int world_size, int64_t row, float* scratch) {
  static constexpr Form kForm = usual_form(kDtype, kNormDtype);
  run_row<kDtype == kBFloat16>(kForm, call, parts, world_size, row, scratch);
}

inline void any_row(
    const Call& call, const void* const* parts, int world_size, int64_t row, float* scratch) {
  run_row<false>(call.form, call, parts, world_size, row, scratch);
}

inline void reduce_row(
    const Call& call, const void* const* parts, int world_size, void* target) {
  if (call.form.x_dtype == kBFloat16)
    return sum_row<true>(call.form, call, parts, world_size, target);
  sum_row<false>(call.form, call, parts, world_size, target);
}

inline RowFunction row_function(const Form& form) {
  struct Entry {
    Form form;
    RowFunction function;
  };
  static constexpr Entry kUsual[] = {
      {usual_form(kBFloat16, kBFloat16), usual_row<kBFloat16, kBFloat16>},
      {usual_form(kBFloat16, kFloat32), usual_row<kBFloat16, kFloat32>},
      {usual_form(kFloat16, kFloat16), usual_row<kFloat16, kFloat16>},
      {usual_form(kFloat16, kFloat32), usual_row<kFloat16, kFloat32>},
      {usual_form(kFloat32, kFloat32), usual_row<kFloat32, kFloat32>},
  };
  for (const Entry& entry : kUsual)
    if (std::memcmp(&entry.form, &form, sizeof(Form)) == 0) return entry.function;
  return any_row;
}

} // namespace fx_fusion
