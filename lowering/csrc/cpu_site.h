// The arithmetic of one row: sum over ranks, bias, scale, residual, RMSNorm.
//
// Equal, with the roundings, to the eager lines of lowering/unfused.py:
//
//   reduced = sum over ranks in rank order, in fp32, from +0.0, rounded to x's dtype
//   h       = reduced [-> add_dtype] [+ bias] [* scale] [residual +], rounded at each step
//   norm    = h32 * rsqrt(mean(h32^2) + eps) [-> norm_dtype] [* weight] -> out_dtype
//
// The sum of squares has one tree whatever the vector width: the elements j with the same
// j mod 64 are added up in order, and these 64 sums are added pairwise. So results depend
// neither on the instruction set nor on threads nor on the batch a row is in.
#pragma once

#include "cpu_block.h"

#include <cmath>

namespace fx_fusion {

enum WeightForm : int32_t { kNoWeight = 0, kWeight = 1, kOnePlusWeight = 2 };
enum Reciprocal : int32_t { kRsqrt = 0, kSqrt = 1 };

// The steps of a site and their dtypes; the dtype of an absent tensor is 0.
struct Form {
  int32_t has_bias;
  int32_t has_scale;
  int32_t has_residual;
  int32_t x_dtype;
  int32_t residual_dtype;
  int32_t weight_dtype;
  int32_t bias_dtype;
  int32_t cast_dtype;     // after the cast in front of the adds
  int32_t bias_out_dtype; // after the bias (and the scale)
  int32_t hidden_dtype;   // after the residual
  int32_t norm_dtype;     // of the normalised value in front of the weight
  int32_t product_dtype;  // of the product with the weight
  int32_t out_dtype;
  int32_t weight_form;
  int32_t reciprocal;
};

// One call, as the Python side fills it in; null pointers are absent inputs or unwanted outputs.
struct Call {
  const void* x;
  const void* residual;
  const void* weight;
  const void* bias;
  void* norm;
  void* residual_out;
  void* reduced;
  float* rstd;
  int64_t tokens;
  int64_t hidden;
  float eps;
  float scale;
  Form form;
  int32_t threads;
  int32_t two_shot;
};

// The sum over ranks of one block, rounded to x's dtype; parts[r] is rank r's row.
template <bool kSplit>
FX_INLINE void sum_over_ranks(
    const Form& form, const void* const* parts, int world_size, int64_t column, int64_t count,
    Block& total) {
  for (int i = 0; i < kVecs; ++i) total.v[i] = Vec(0.0f);
  Block part;
  for (int rank = 0; rank < world_size; ++rank) {
    load<kSplit>(form.x_dtype, parts[rank], column, count, part);
    for (int i = 0; i < kVecs; ++i) total.v[i] = total.v[i] + part.v[i];
  }
  round_to<kSplit>(form.x_dtype, total);
}

// From the reduced value of one block to the hidden state, but for its last rounding.
template <bool kSplit>
FX_INLINE void hidden_state(
    const Form& form, const Call& call, int64_t offset, int64_t column, int64_t count,
    Block& block) {
  if (form.cast_dtype != form.x_dtype) round_to<kSplit>(form.cast_dtype, block);
  Block other;
  if (form.has_bias) {
    load<kSplit>(form.bias_dtype, call.bias, column, count, other);
    for (int i = 0; i < kVecs; ++i) block.v[i] = block.v[i] + other.v[i];
    round_to<kSplit>(form.bias_out_dtype, block);
  }
  if (form.has_scale) {
    const Vec scale(call.scale);
    for (int i = 0; i < kVecs; ++i) block.v[i] = block.v[i] * scale;
    round_to<kSplit>(form.bias_out_dtype, block);
  }
  if (form.has_residual) {
    load<kSplit>(form.residual_dtype, call.residual, offset + column, count, other);
    for (int i = 0; i < kVecs; ++i) block.v[i] = other.v[i] + block.v[i];
  }
}

// The first pass over one block of a row: the hidden state goes to `hidden`, its squares are added.
template <bool kSplit>
FX_INLINE void add_block(
    const Form& form, const Call& call, const void* const* parts, int world_size, int64_t offset,
    int64_t column, int64_t count, void* hidden, Block& squares) {
  Block block;
  sum_over_ranks<kSplit>(form, parts, world_size, column, count, block);
  if (call.reduced) store<kSplit>(form.x_dtype, call.reduced, offset + column, count, block);
  hidden_state<kSplit>(form, call, offset, column, count, block);
  store<kSplit>(form.hidden_dtype, hidden, column, count, block);
  // bias or scale may have filled the lanes behind the end of a short block
  if (count < kLanes) load<kSplit>(form.hidden_dtype, hidden, column, count, block);
  for (int i = 0; i < kVecs; ++i) squares.v[i] = squares.v[i] + block.v[i] * block.v[i];
}

// The second pass over one block of a row, from `hidden` to the norm.
template <bool kSplit>
FX_INLINE void norm_block(
    const Form& form, const Call& call, const void* hidden, const Vec& factor, int64_t offset,
    int64_t column, int64_t count) {
  Block block, weight;
  load<kSplit>(form.hidden_dtype, hidden, column, count, block);
  for (int i = 0; i < kVecs; ++i)
    block.v[i] = form.reciprocal == kSqrt ? block.v[i] / factor : block.v[i] * factor;
  if (form.norm_dtype != form.out_dtype) round_to<kSplit>(form.norm_dtype, block);
  if (form.weight_form != kNoWeight) {
    if (form.norm_dtype == form.out_dtype) round_to<kSplit>(form.norm_dtype, block);
    load<kSplit>(form.weight_dtype, call.weight, column, count, weight);
    if (form.weight_form == kOnePlusWeight)
      for (int i = 0; i < kVecs; ++i) weight.v[i] = Vec(1.0f) + weight.v[i];
    for (int i = 0; i < kVecs; ++i) block.v[i] = block.v[i] * weight.v[i];
    if (form.product_dtype != form.out_dtype) round_to<kSplit>(form.product_dtype, block);
  }
  store<kSplit>(form.out_dtype, call.norm, offset + column, count, block);
}

template <bool kSplit>
inline float sum_of_lanes(const Block& lanes) {
  alignas(64) float stored[kLanes], values[kLanes];
  for (int i = 0; i < kVecs; ++i) lanes.v[i].store(stored + i * Vec::size());
  for (int lane = 0; lane < kLanes; ++lane) values[position<kSplit>(lane)] = stored[lane];
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) values[i] = values[i] + values[i + width];
  return values[0];
}

// One row. `parts` are all ranks' rows, or with world_size 1 the row already reduced. The second
// pass reads the hidden state where the first has put it: in its output, else in `scratch`,
// which holds a row of fp32.
template <bool kSplit>
FX_INLINE void run_row(
    const Form& form, const Call& call, const void* const* parts, int world_size, int64_t row,
    float* scratch) {
  const int64_t offset = row * call.hidden;
  const int64_t whole = call.hidden / kLanes * kLanes;
  const int64_t rest = call.hidden - whole;
  void* hidden = scratch;
  if (call.residual_out)
    hidden = static_cast<char*>(call.residual_out) + offset * element_size(form.hidden_dtype);
  Block squares;
  for (int i = 0; i < kVecs; ++i) squares.v[i] = Vec(0.0f);
  for (int64_t column = 0; column < whole; column += kLanes)
    add_block<kSplit>(form, call, parts, world_size, offset, column, kLanes, hidden, squares);
  if (rest) add_block<kSplit>(form, call, parts, world_size, offset, whole, rest, hidden, squares);
  const float sum = sum_of_lanes<kSplit>(squares);
  const float mean_square = sum / static_cast<float>(call.hidden) + call.eps;
  const float root = std::sqrt(mean_square);
  const float rstd = 1.0f / root;
  if (call.rstd) call.rstd[row] = rstd;
  if (!call.norm) return;
  const Vec factor(form.reciprocal == kSqrt ? root : rstd);
  for (int64_t column = 0; column < whole; column += kLanes)
    norm_block<kSplit>(form, call, hidden, factor, offset, column, kLanes);
  if (rest) norm_block<kSplit>(form, call, hidden, factor, offset, whole, rest);
}

// The sum over ranks of one row alone, to `target`.
template <bool kSplit>
FX_INLINE void sum_row(
    const Form& form, const Call& call, const void* const* parts, int world_size, void* target) {
  Block block;
  for (int64_t column = 0; column < call.hidden; column += kLanes) {
    const int64_t count = call.hidden - column;
    sum_over_ranks<kSplit>(form, parts, world_size, column, count, block);
    store<kSplit>(form.x_dtype, target, column, count, block);
  }
}

} // namespace fx_fusion
