// 64 consecutive elements of a row in fp32: how they are read, rounded and written.
//
// Everything is forced inline: where the dtypes are constants (cpu_forms.h) the branches on them
// go away.
//
// A block is in one of two orders. Straight: element p of the block is lane p. Split, for rows
// that are bfloat16 throughout: of each run of 2 * Vec::size() elements the even ones are in one
// vector and the odd ones in the next, so that reading is a shift and a mask, and writing a shift
// and an or, without a permutation. `position` tells which element a lane holds.
#pragma once

#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

#include <cstdint>
#include <cstring>

#define FX_INLINE inline __attribute__((always_inline))

namespace fx_fusion {

using Vec = at::vec::Vectorized<float>;
constexpr int kLanes = 64;
constexpr int kVecs = kLanes / Vec::size();

enum Dtype : int32_t { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };

FX_INLINE int64_t element_size(int32_t dtype) { return dtype == kFloat32 ? 4 : 2; }

// 64 consecutive elements, as fp32.
struct Block {
  Vec v[kVecs];
};

using IntVec = at::vec::Vectorized<int32_t>;
constexpr int32_t kUpperHalf = static_cast<int32_t>(0xffff0000);

template <bool kSplit>
constexpr int position(int lane) {
  if (!kSplit) return lane;
  const int run = lane / (2 * Vec::size()) * (2 * Vec::size());
  const int half = (lane - run) / Vec::size();
  return run + 2 * (lane % Vec::size()) + half;
}

FX_INLINE void load_split(const void* source, Block& block) {
  for (int i = 0; i < kVecs; i += 2) {
    const IntVec pair =
        IntVec::loadu(static_cast<const char*>(source) + i * Vec::size() * sizeof(at::BFloat16));
    block.v[i] = at::vec::cast<float>(pair << IntVec(16));
    block.v[i + 1] = at::vec::cast<float>(pair & IntVec(kUpperHalf));
  }
}

// To the nearest bfloat16, ties to even. The lower half of a NaN must be zero, as it is in what
// comes from bfloat16 values and in the NaN that arithmetic makes: then nothing carries.
FX_INLINE Vec round_split(const Vec& value) {
  const IntVec bits = at::vec::cast<int32_t>(value);
  const IntVec odd = (bits >> IntVec(16)) & IntVec(1);
  return at::vec::cast<float>((bits + IntVec(0x7fff) + odd) & IntVec(kUpperHalf));
}

FX_INLINE void round_split(Block& block) {
  for (int i = 0; i < kVecs; ++i) block.v[i] = round_split(block.v[i]);
}

// Writes a block whose values are bfloat16 values already.
FX_INLINE void store_split(void* target, const Block& block) {
  for (int i = 0; i < kVecs; i += 2) {
    const IntVec even = at::vec::cast<int32_t>(block.v[i]) >> IntVec(16);
    const IntVec odd = at::vec::cast<int32_t>(block.v[i + 1]);
    const IntVec pair = (even & IntVec(0xffff)) | odd;
    pair.store(static_cast<char*>(target) + i * Vec::size() * sizeof(at::BFloat16));
  }
}

template <typename T>
FX_INLINE void load_reduced(const T* source, Block& block) {
  using V = at::vec::Vectorized<T>;
  for (int i = 0; i < kVecs; i += 2) {
    auto pair = at::vec::convert_to_float<T>(V::loadu(source + i * Vec::size()));
    block.v[i] = std::get<0>(pair);
    block.v[i + 1] = std::get<1>(pair);
  }
}

template <typename T>
FX_INLINE void round_reduced(Block& block) {
  for (int i = 0; i < kVecs; i += 2) {
    auto pair = at::vec::convert_to_float<T>(
        at::vec::convert_from_float<T>(block.v[i], block.v[i + 1]));
    block.v[i] = std::get<0>(pair);
    block.v[i + 1] = std::get<1>(pair);
  }
}

template <typename T>
FX_INLINE void store_reduced(T* target, Block& block) {
  for (int i = 0; i < kVecs; i += 2) {
    const auto rounded = at::vec::convert_from_float<T>(block.v[i], block.v[i + 1]);
    rounded.store(target + i * Vec::size());
    const auto pair = at::vec::convert_to_float<T>(rounded);
    block.v[i] = std::get<0>(pair);
    block.v[i + 1] = std::get<1>(pair);
  }
}

template <bool kSplit>
FX_INLINE void load_full(int32_t dtype, const void* base, int64_t offset, Block& block) {
  if (kSplit) {
    load_split(static_cast<const at::BFloat16*>(base) + offset, block);
  } else if (dtype == kFloat32) {
    const float* source = static_cast<const float*>(base) + offset;
    for (int i = 0; i < kVecs; ++i) block.v[i] = Vec::loadu(source + i * Vec::size());
  } else if (dtype == kBFloat16) {
    load_reduced(static_cast<const at::BFloat16*>(base) + offset, block);
  } else {
    load_reduced(static_cast<const at::Half*>(base) + offset, block);
  }
}

template <bool kSplit>
FX_INLINE void round_to(int32_t dtype, Block& block) {
  if (kSplit) {
    if (dtype != kFloat32) round_split(block);
  } else if (dtype == kBFloat16) {
    round_reduced<at::BFloat16>(block);
  } else if (dtype == kFloat16) {
    round_reduced<at::Half>(block);
  }
}

// Writes the block and keeps in it what was written: the values rounded to `dtype`.
template <bool kSplit>
FX_INLINE void store_full(int32_t dtype, void* base, int64_t offset, Block& block) {
  if (kSplit) {
    round_split(block);
    store_split(static_cast<at::BFloat16*>(base) + offset, block);
  } else if (dtype == kFloat32) {
    float* target = static_cast<float*>(base) + offset;
    for (int i = 0; i < kVecs; ++i) block.v[i].store(target + i * Vec::size());
  } else if (dtype == kBFloat16) {
    store_reduced(static_cast<at::BFloat16*>(base) + offset, block);
  } else {
    store_reduced(static_cast<at::Half*>(base) + offset, block);
  }
}

// The last block of a row may be short: it goes through a padded buffer, zeros behind the end.
template <bool kSplit>
FX_INLINE void load(
    int32_t dtype, const void* base, int64_t offset, int64_t count, Block& block) {
  if (count >= kLanes) return load_full<kSplit>(dtype, base, offset, block);
  alignas(64) float padded[kLanes] = {};
  const int64_t bytes = element_size(dtype);
  std::memcpy(padded, static_cast<const char*>(base) + offset * bytes, count * bytes);
  load_full<kSplit>(dtype, padded, 0, block);
}

// As store_full, for a block that may be short.
template <bool kSplit>
FX_INLINE void store(int32_t dtype, void* base, int64_t offset, int64_t count, Block& block) {
  if (count >= kLanes) return store_full<kSplit>(dtype, base, offset, block);
  alignas(64) float padded[kLanes];
  const int64_t bytes = element_size(dtype);
  store_full<kSplit>(dtype, padded, 0, block);
  std::memcpy(static_cast<char*>(base) + offset * bytes, padded, count * bytes);
}

} // namespace fx_fusion
