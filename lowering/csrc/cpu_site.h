// The arithmetic of one row: sum over ranks, bias, scale, residual, RMSNorm.
//
// Equal, with the roundings, to the eager lines of lowering/unfused.py:
//
//   reduced = sum over ranks in rank order, in fp32, from +0.0, rounded to x's dtype
//   h       = reduced [-> add_dtype] [+ bias] [* scale] [residual +], rounded at each step
//   norm    = h32 * rsqrt(mean(h32^2) + eps) [-> norm_dtype] [* weight] -> out_dtype
//
// The sum of squares has one tree whatever the vector width: element j goes to lane j mod 64,
// each lane is added up in order, and the 64 lanes are added pairwise. So results depend
// neither on the instruction set nor on threads nor on the batch a row is in.
#pragma once

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace fx_fusion {

using Vec = at::vec::Vectorized<float>;
constexpr int kLanes = 64;
constexpr int kVecs = kLanes / Vec::size();

enum Dtype : int32_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };
enum WeightForm : int32_t { kNoWeight = 0, kWeight = 1, kOnePlusWeight = 2 };
enum Reciprocal : int32_t { kRsqrt = 0, kSqrt = 1 };

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
  int32_t has_scale;
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
  int32_t threads;
  int32_t two_shot;
};

inline int64_t element_size(int32_t dtype) { return dtype == kFloat32 ? 4 : 2; }

// 64 consecutive elements, as fp32.
struct Block {
  Vec v[kVecs];
};

template <typename T>
inline void load_reduced(const T* source, Block& block) {
  using V = at::vec::Vectorized<T>;
  for (int i = 0; i < kVecs; i += 2) {
    auto pair = at::vec::convert_to_float<T>(V::loadu(source + i * Vec::size()));
    block.v[i] = std::get<0>(pair);
    block.v[i + 1] = std::get<1>(pair);
  }
}

template <typename T>
inline void store_reduced(T* target, const Block& block) {
  for (int i = 0; i < kVecs; i += 2)
    at::vec::convert_from_float<T>(block.v[i], block.v[i + 1]).store(target + i * Vec::size());
}

template <typename T>
inline void round_reduced(Block& block) {
  for (int i = 0; i < kVecs; i += 2) {
    auto pair = at::vec::convert_to_float<T>(
        at::vec::convert_from_float<T>(block.v[i], block.v[i + 1]));
    block.v[i] = std::get<0>(pair);
    block.v[i + 1] = std::get<1>(pair);
  }
}

inline void load_full(int32_t dtype, const void* base, int64_t offset, Block& block) {
  if (dtype == kFloat32) {
    const float* source = static_cast<const float*>(base) + offset;
    for (int i = 0; i < kVecs; ++i) block.v[i] = Vec::loadu(source + i * Vec::size());
  } else if (dtype == kBFloat16) {
    load_reduced(static_cast<const at::BFloat16*>(base) + offset, block);
  } else {
    load_reduced(static_cast<const at::Half*>(base) + offset, block);
  }
}

inline void store_full(int32_t dtype, void* base, int64_t offset, const Block& block) {
  if (dtype == kFloat32) {
    float* target = static_cast<float*>(base) + offset;
    for (int i = 0; i < kVecs; ++i) block.v[i].store(target + i * Vec::size());
  } else if (dtype == kBFloat16) {
    store_reduced(static_cast<at::BFloat16*>(base) + offset, block);
  } else {
    store_reduced(static_cast<at::Half*>(base) + offset, block);
  }
}

// The last block of a row may be short: it goes through a padded buffer, zeros behind the end.
inline void load(int32_t dtype, const void* base, int64_t offset, int64_t count, Block& block) {
  if (count >= kLanes) return load_full(dtype, base, offset, block);
  alignas(64) float padded[kLanes] = {};
  const int64_t bytes = element_size(dtype);
  std::memcpy(padded, static_cast<const char*>(base) + offset * bytes, count * bytes);
  load_full(dtype, padded, 0, block);
}

inline void store(int32_t dtype, void* base, int64_t offset, int64_t count, const Block& block) {
  if (count >= kLanes) return store_full(dtype, base, offset, block);
  alignas(64) float padded[kLanes];
  const int64_t bytes = element_size(dtype);
  store_full(dtype, padded, 0, block);
  std::memcpy(static_cast<char*>(base) + offset * bytes, padded, count * bytes);
}

inline void round_to(int32_t dtype, Block& block) {
  if (dtype == kBFloat16) round_reduced<at::BFloat16>(block);
  if (dtype == kFloat16) round_reduced<at::Half>(block);
}

// The sum over ranks of one block, rounded to x's dtype; parts[r] is rank r's row.
inline void sum_over_ranks(
    const Call& call, const void* const* parts, int world_size, int64_t column, int64_t count,
    Block& total) {
  for (int i = 0; i < kVecs; ++i) total.v[i] = Vec(0.0f);
  Block part;
  for (int rank = 0; rank < world_size; ++rank) {
    load(call.x_dtype, parts[rank], column, count, part);
    for (int i = 0; i < kVecs; ++i) total.v[i] = total.v[i] + part.v[i];
  }
  round_to(call.x_dtype, total);
}

inline float sum_of_lanes(const Block& lanes) {
  alignas(64) float values[kLanes];
  for (int i = 0; i < kVecs; ++i) lanes.v[i].store(values + i * Vec::size());
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) values[i] = values[i] + values[i + width];
  return values[0];
}

// From the reduced value of one block to the hidden state.
inline void hidden_state(
    const Call& call, int64_t offset, int64_t column, int64_t count, Block& block) {
  round_to(call.cast_dtype, block);
  Block other;
  if (call.bias) {
    load(call.bias_dtype, call.bias, column, count, other);
    for (int i = 0; i < kVecs; ++i) block.v[i] = block.v[i] + other.v[i];
    round_to(call.bias_out_dtype, block);
  }
  if (call.has_scale) {
    const Vec scale(call.scale);
    for (int i = 0; i < kVecs; ++i) block.v[i] = block.v[i] * scale;
    round_to(call.bias_out_dtype, block);
  }
  if (call.residual) {
    load(call.residual_dtype, call.residual, offset + column, count, other);
    for (int i = 0; i < kVecs; ++i) block.v[i] = other.v[i] + block.v[i];
    round_to(call.hidden_dtype, block);
  }
}

// One row; `scratch` holds the hidden state in fp32, a multiple of 64 elements long.
// `parts` are all ranks' rows, or with world_size 1 the row already reduced.
inline void run_row(
    const Call& call, const void* const* parts, int world_size, int64_t row, float* scratch) {
  const int64_t offset = row * call.hidden;
  Block block, squares;
  for (int i = 0; i < kVecs; ++i) squares.v[i] = Vec(0.0f);
  for (int64_t column = 0; column < call.hidden; column += kLanes) {
    const int64_t count = call.hidden - column;
    sum_over_ranks(call, parts, world_size, column, count, block);
    if (call.reduced) store(call.x_dtype, call.reduced, offset + column, count, block);
    hidden_state(call, offset, column, count, block);
    if (call.residual_out)
      store(call.hidden_dtype, call.residual_out, offset + column, count, block);
    if (count < kLanes) {  // bias or scale may have filled the lanes behind the end
      alignas(64) float values[kLanes];
      store_full(kFloat32, values, 0, block);
      for (int64_t i = count; i < kLanes; ++i) values[i] = 0.0f;
      load_full(kFloat32, values, 0, block);
    }
    for (int i = 0; i < kVecs; ++i) {
      squares.v[i] = squares.v[i] + block.v[i] * block.v[i];
      block.v[i].store(scratch + column + i * Vec::size());
    }
  }
  const float mean_square = sum_of_lanes(squares) / static_cast<float>(call.hidden) + call.eps;
  const float root = std::sqrt(mean_square);
  const float rstd = 1.0f / root;
  if (call.rstd) call.rstd[row] = rstd;
  if (!call.norm) return;
  const Vec factor(call.reciprocal == kSqrt ? root : rstd);
  Block weight;
  for (int64_t column = 0; column < call.hidden; column += kLanes) {
    const int64_t count = call.hidden - column;
    for (int i = 0; i < kVecs; ++i) {
      const Vec value = Vec::loadu(scratch + column + i * Vec::size());
      block.v[i] = call.reciprocal == kSqrt ? value / factor : value * factor;
    }
    round_to(call.norm_dtype, block);
    if (call.weight_form != kNoWeight) {
      load(call.weight_dtype, call.weight, column, count, weight);
      if (call.weight_form == kOnePlusWeight)
        for (int i = 0; i < kVecs; ++i) weight.v[i] = Vec(1.0f) + weight.v[i];
      for (int i = 0; i < kVecs; ++i) block.v[i] = block.v[i] * weight.v[i];
      round_to(call.product_dtype, block);
    }
    store(call.out_dtype, call.norm, offset + column, count, block);
  }
}

} // namespace fx_fusion
