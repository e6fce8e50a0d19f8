// One-shot all_reduce + bias + scale + residual + RMSNorm: every rank sends its partial sums to
// every other, and each adds them up, all in one launch.
//
//   reduced = sum over ranks in rank order, in fp32, from +0.0, rounded to x's dtype
//   h       = reduced [-> add_dtype] [+ bias] [* scale] [residual +], rounded at each step
//   norm    = h * rsqrt(mean(h^2) + eps) [-> norm_dtype] [* weight] -> out_dtype
//
// The data is its own flag. A rank's receive buffer holds -0.0 wherever nothing has arrived; a
// sender turns its own -0.0 into +0.0, which changes no sum that starts from +0.0. A reader polls
// every element that it needs until none is -0.0. Three slots take turns, so no barrier is needed
// at the end: a use reads slot s and wipes slot s-1. A peer writes slot s-1 again two uses later,
// and by then it has had this rank's data of the next use, sent after this wipe.
//
// The buffer is [slot][source][segment][512 vectors of 16 bytes], its strides fixed when it was
// made, whatever the call. A row takes as many whole segments as it needs. Slot and extent of a
// segment's last use are kept per segment, in device memory, so that calls of any size mix, and
// so that a CUDA graph replays. 16- and 32-bit elements have buffers of their own.
//
// The sum of squares has one tree per (hidden size, x's dtype): 32 vectors are a leaf, added up
// within a warp; leaf l goes to lane l mod 32; the lanes are added pairwise. How many blocks
// share a row plays no part: they exchange leaves.
#include "gpu_device.h"

// Options, all compile-time. Dtypes as in `Dtype`; -1 where an input is absent.
//   WORLD CLUSTER THREADS BLOCKS VECTORS_PER_THREAD ALIGNED
//   X_DTYPE RESIDUAL_DTYPE BIAS_DTYPE WEIGHT_DTYPE  CAST_DTYPE BIAS_OUT_DTYPE HIDDEN_DTYPE
//   NORM_DTYPE PRODUCT_DTYPE OUT_DTYPE  ONE_PLUS_WEIGHT DIVIDE_BY_ROOT HAS_SCALE
//   WANT_NORM WANT_RESIDUAL WANT_REDUCED WANT_RSTD

constexpr int kWorld = WORLD;
constexpr int kVectors = VECTORS_PER_THREAD;
constexpr int kElements = X_DTYPE == kFloat32 ? 4 : 8;  // of x in 16 bytes
constexpr int kSegment = 512;                           // vectors
constexpr int kMaxLeaves = 128;
constexpr int kGroup = kWorld < 8 ? kWorld : 8;  // sources polled at once
constexpr u32 kEmpty = X_DTYPE == kFloat32 ? 0x80000000u : 0x80008000u;
constexpr u32 kSpinsPerLook = 64;  // polls between two looks at the clock

enum Cause : u32 { kPeerTimeout = 1, kOverlap = 2 };

struct alignas(16) State {
  u32 slot;    // of the next use
  u32 extent;  // vectors that the last use wrote
  u32 busy;    // a launch is at work on it
  u32 unused;
};

struct Params {
  // of the call
  const void* x;
  const void* residual;
  const void* weight;
  const void* bias;
  const float* eps_pointer;    // or null
  const float* scale_pointer;  // or null
  void* norm;
  void* residual_out;
  void* reduced;
  float* rstd;
  int rows;
  u32 clusters;  // in the grid
  float eps;
  float scale;
  // of the hidden size
  int hidden;
  int vectors;       // ceil(hidden / kElements)
  int row_segments;  // ceil(vectors / kSegment)
  float inverse_hidden;
  // of the workspace
  int rank;
  u32 segments;
  u64 timeout;  // nanoseconds
  State* state;
  u32* control;  // [0]: the cause, once something failed
  u32* host;     // mapped host memory: [0] the cause, [1 + r] rank r was waited for in vain
  char* buffers[16];
};

// ---- elements ---------------------------------------------------------------------------

template <int DTYPE>
struct Tile {
  static constexpr int kCount = kElements * (DTYPE == kFloat32 ? 4 : 2) / 4;
  u32 w[kCount];
};

template <>
struct Tile<-1> {
  u32 w[1];
};

// Elements [first, first + kElements) of an array; `left` of them exist, the others read as 0.
template <int DTYPE>
DEVICE void read(Tile<DTYPE>& tile, const void* base, u64 first, int left) {
  if constexpr (DTYPE < 0) return;
  else if constexpr (ALIGNED) {
    const char* p = static_cast<const char*>(base) + first * (DTYPE == kFloat32 ? 4 : 2);
    if constexpr (Tile<DTYPE>::kCount == 2) {
      const u64 v = load(reinterpret_cast<const u64*>(p));
      tile.w[0] = static_cast<u32>(v);
      tile.w[1] = static_cast<u32>(v >> 32);
    } else {
#pragma unroll
      for (int i = 0; i < Tile<DTYPE>::kCount; i += 4) {
        const Words v = load(reinterpret_cast<const Words*>(p) + i / 4);
#pragma unroll
        for (int k = 0; k < 4; ++k) tile.w[i + k] = v.w[k];
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      if constexpr (DTYPE == kFloat32) {
        tile.w[i] = i < left ? load(static_cast<const u32*>(base) + first + i) : 0u;
      } else {
        const u32 v = i < left ? load(static_cast<const u16*>(base) + first + i) : 0u;
        if (i & 1) tile.w[i / 2] |= v << 16;
        else tile.w[i / 2] = v;
      }
    }
  }
}

template <int DTYPE>
DEVICE void widen(const Tile<DTYPE>& tile, float (&v)[kElements]) {
#pragma unroll
  for (int i = 0; i < kElements; i += 2) {
    if constexpr (DTYPE == kFloat32) {
      v[i] = as_float(tile.w[i]);
      v[i + 1] = as_float(tile.w[i + 1]);
    } else {
      v[i] = low_of<DTYPE>(tile.w[i / 2]);
      v[i + 1] = high_of<DTYPE>(tile.w[i / 2]);
    }
  }
}

template <int DTYPE>
DEVICE void write(void* base, u64 first, int left, const float (&v)[kElements]) {
  Tile<DTYPE> tile;
#pragma unroll
  for (int i = 0; i < kElements; i += 2) {
    if constexpr (DTYPE == kFloat32) {
      tile.w[i] = as_word(v[i]);
      tile.w[i + 1] = as_word(v[i + 1]);
    } else {
      tile.w[i / 2] = pack<DTYPE>(v[i], v[i + 1]);
    }
  }
  if constexpr (ALIGNED) {
    char* p = static_cast<char*>(base) + first * (DTYPE == kFloat32 ? 4 : 2);
    if constexpr (Tile<DTYPE>::kCount == 2) {
      *reinterpret_cast<u64*>(p) = tile.w[0] | static_cast<u64>(tile.w[1]) << 32;
    } else {
#pragma unroll
      for (int i = 0; i < Tile<DTYPE>::kCount; i += 4)
        reinterpret_cast<Words*>(p)[i / 4] =
            Words{{tile.w[i], tile.w[i + 1], tile.w[i + 2], tile.w[i + 3]}};
    }
  } else {
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      if (i >= left) break;
      if constexpr (DTYPE == kFloat32) static_cast<u32*>(base)[first + i] = tile.w[i];
      else static_cast<u16*>(base)[first + i] = static_cast<u16>(tile.w[i / 2] >> 16 * (i & 1));
    }
  }
}

template <int DTYPE>
DEVICE void round_to(float (&v)[kElements]) {
  if constexpr (DTYPE != kFloat32) {
#pragma unroll
    for (int i = 0; i < kElements; i += 2) {
      const u32 pair = pack<DTYPE>(v[i], v[i + 1]);
      v[i] = low_of<DTYPE>(pair);
      v[i + 1] = high_of<DTYPE>(pair);
    }
  }
}

// ---- the exchange -----------------------------------------------------------------------

DEVICE bool has_empty(const Words& v) {
  u32 found = 0;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if constexpr (X_DTYPE == kFloat32) {
      found |= v.w[k] == kEmpty;
    } else {  // is a half of the difference zero?
      const u32 d = v.w[k] ^ kEmpty;
      found |= (d - 0x00010001u) & ~d & 0x80008000u;
    }
  }
  return found != 0;
}

// -0.0 becomes +0.0.
DEVICE Words without_empty(Words v) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    if constexpr (X_DTYPE == kFloat32) {
      if (v.w[k] == kEmpty) v.w[k] = 0;
    } else {
      if ((v.w[k] & 0xffffu) == 0x8000u) v.w[k] &= 0xffff0000u;
      if ((v.w[k] >> 16) == 0x8000u) v.w[k] &= 0xffffu;
    }
  }
  return v;
}

// Where `source` puts a segment for `receiver`; a rank keeps no place for itself.
DEVICE Words* place(const Params& p, int receiver, int source, u32 slot, u32 segment) {
  const u32 index = source < receiver ? source : source - 1;
  const u64 at = (static_cast<u64>(slot * (kWorld - 1) + index) * p.segments + segment);
  return reinterpret_cast<Words*>(p.buffers[receiver]) + at * kSegment;
}

DEVICE void report(const Params& p, Cause cause) {
  push_word(p.control, cause);
  fence_system();
  push_word(p.host, cause);
}

// The sum over ranks, in rank order. False if a peer didn't come in time.
DEVICE bool gather(const Params& p, const Words& own, u32 slot, u32 segment, u32 column,
                   float (&sum)[kElements]) {
  const Words* mine = place(p, p.rank, p.rank == 0 ? 1 : 0, slot, segment) + column;
  const u64 stride = static_cast<u64>(p.segments) * kSegment;  // from source to source
#pragma unroll
  for (int i = 0; i < kElements; ++i) sum[i] = 0.0f;
#pragma unroll
  for (int first = 0; first < kWorld; first += kGroup) {
    Words got[kGroup];
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const int source = first + i;
      if (source >= kWorld) continue;
      got[i] = own;
      if (source != p.rank) got[i] = poll(mine + (source - (source > p.rank)) * stride);
    }
    u32 spins = 0;
    u64 start = 0;
    while (true) {
      bool again = false;
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        const int source = first + i;
        if (source < kWorld && source != p.rank && has_empty(got[i])) {
          got[i] = poll(mine + (source - (source > p.rank)) * stride);
          again = true;
        }
      }
      if (!again) break;
      if (++spins % kSpinsPerLook == 0) {
        const u64 now = nanoseconds();
        if (start == 0) start = now;
        const bool late = now - start > p.timeout;
        if (!late && poll_word(p.control) == 0) continue;
        if (late) {
#pragma unroll
          for (int i = 0; i < kGroup; ++i) {
            const int source = first + i;
            if (source < kWorld && source != p.rank && has_empty(got[i]))
              push_word(p.host + 1 + source, 1);
          }
          report(p, kPeerTimeout);
        }
        return false;
      }
    }
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      if (first + i >= kWorld) continue;
      Tile<X_DTYPE> tile;
      float v[kElements];
#pragma unroll
      for (int k = 0; k < 4; ++k) tile.w[k] = got[i].w[k];
      widen(tile, v);
#pragma unroll
      for (int k = 0; k < kElements; ++k) sum[k] = sum[k] + v[k];
    }
  }
  return true;
}

// ---- the kernel -------------------------------------------------------------------------

KERNEL void BOUNDS(THREADS, BLOCKS) fx_fusion_one_shot(const Params p) {
  SHARED(float, leaves, kMaxLeaves);  // two of them, [2][kMaxLeaves]
  const u32 thread = thread_index();
  const u32 lane = thread % 32;
  const u32 block = CLUSTER > 1 ? cluster_rank() : 0;
  const u32 threads = THREADS;
  const int leaf_count = (p.vectors + 31) / 32;
  if (CLUSTER > 1) cluster_arrive_relaxed();  // so that no store meets a block not yet started
  wait_for_predecessor();
  const bool broken = poll_word(p.control) != 0;
  bool met = false;
  u32 turn = 0;

  for (u32 row = block_index() / CLUSTER; row < static_cast<u32>(p.rows); row += p.clusters) {
    Words x[kVectors];
    Tile<RESIDUAL_DTYPE> residual[kVectors];
    Tile<WEIGHT_DTYPE> weight[kVectors];
    Tile<BIAS_DTYPE> bias[kVectors];
    u64 state[kVectors];  // slot in the low word, extent in the high
    u32 was_busy = 0;

#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int j = (k * CLUSTER + block) * threads + thread;
      if (j >= p.vectors) continue;
      const u32 segment = row * p.row_segments + j / kSegment;
      state[k] = load(reinterpret_cast<const u64*>(p.state + segment));
      Tile<X_DTYPE> tile;
      const u64 at = static_cast<u64>(row) * p.hidden + static_cast<u64>(j) * kElements;
      const int left = p.hidden - j * kElements;
      read(tile, p.x, at, left);
#pragma unroll
      for (int i = 0; i < 4; ++i) x[k].w[i] = tile.w[i];
    }
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int j = (k * CLUSTER + block) * threads + thread;
      if (j >= p.vectors) continue;
      const u64 at = static_cast<u64>(row) * p.hidden + static_cast<u64>(j) * kElements;
      const int left = p.hidden - j * kElements;
      read(residual[k], p.residual, at, left);
      read(weight[k], p.weight, static_cast<u64>(j) * kElements, left);
      read(bias[k], p.bias, static_cast<u64>(j) * kElements, left);
      if (j % kSegment == 0)
        was_busy |= exchange(&p.state[row * p.row_segments + j / kSegment].busy, 1);
    }

    if (!broken) {
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        const int j = (k * CLUSTER + block) * threads + thread;
        if (j >= p.vectors) continue;
        const u32 segment = row * p.row_segments + j / kSegment;
        const u32 slot = static_cast<u32>(state[k]);
        const Words v = without_empty(x[k]);
#pragma unroll
        for (int d = 1; d < kWorld; ++d) {
          const int peer = p.rank + d < kWorld ? p.rank + d : p.rank + d - kWorld;
          push(place(p, peer, p.rank, slot, segment) + j % kSegment, v);
        }
      }
      // Wipe what the segment's last use received, all of it, however long this use is.
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        const int j = (k * CLUSTER + block) * threads + thread;
        if (j >= p.vectors) continue;
        const u32 segment = row * p.row_segments + j / kSegment;
        const u32 slot = static_cast<u32>(state[k]);
        const u32 last = slot == 0 ? 2 : slot - 1;
        const u32 extent = static_cast<u32>(state[k] >> 32);
        const int rest = p.vectors - j / kSegment * kSegment;
        const u32 width = rest < kSegment ? rest : kSegment;
        for (u32 column = j % kSegment; column < extent; column += width) {
#pragma unroll
          for (int d = 1; d < kWorld; ++d) {
            const int source = p.rank + d < kWorld ? p.rank + d : p.rank + d - kWorld;
            push(place(p, p.rank, source, last, segment) + column,
                 Words{{kEmpty, kEmpty, kEmpty, kEmpty}});
          }
        }
      }
    }

    float h[kVectors][kElements];
    float squares[kVectors];
    const float scale = !HAS_SCALE || p.scale_pointer == nullptr ? p.scale : load(p.scale_pointer);
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int j = (k * CLUSTER + block) * threads + thread;
      float sum = 0.0f;
      if (j < p.vectors) {
        const u32 segment = row * p.row_segments + j / kSegment;
        const u64 at = static_cast<u64>(row) * p.hidden + static_cast<u64>(j) * kElements;
        const int left = p.hidden - j * kElements;
        if (broken || !gather(p, x[k], static_cast<u32>(state[k]), segment, j % kSegment, h[k])) {
#pragma unroll
          for (int i = 0; i < kElements; ++i) h[k][i] = as_float(0x7fc00000u);
        }
        float other[kElements];
        round_to<X_DTYPE>(h[k]);
        if constexpr (WANT_REDUCED) write<X_DTYPE>(p.reduced, at, left, h[k]);
        if constexpr (CAST_DTYPE != X_DTYPE) round_to<CAST_DTYPE>(h[k]);
        if constexpr (BIAS_DTYPE >= 0) {
          widen(bias[k], other);
#pragma unroll
          for (int i = 0; i < kElements; ++i) h[k][i] = h[k][i] + other[i];
          round_to<BIAS_OUT_DTYPE>(h[k]);
        }
        if constexpr (HAS_SCALE) {
#pragma unroll
          for (int i = 0; i < kElements; ++i) h[k][i] = h[k][i] * scale;
          round_to<BIAS_OUT_DTYPE>(h[k]);
        }
        if constexpr (RESIDUAL_DTYPE >= 0) {
          widen(residual[k], other);
#pragma unroll
          for (int i = 0; i < kElements; ++i) h[k][i] = other[i] + h[k][i];
          round_to<HIDDEN_DTYPE>(h[k]);
        }
        if constexpr (WANT_RESIDUAL) write<HIDDEN_DTYPE>(p.residual_out, at, left, h[k]);
#pragma unroll
        for (int i = 0; i < kElements; ++i)
          if (ALIGNED || i < left) sum = sum + h[k][i] * h[k][i];
      }
      squares[k] = sum;
    }

    // A leaf is the sum over one warp's 32 vectors.
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      float sum = squares[k];
#pragma unroll
      for (u32 mask = 16; mask > 0; mask /= 2) sum = sum + shuffle_xor(sum, mask);
      squares[k] = sum;
    }
    if (CLUSTER > 1 && !met) cluster_wait();
    met = true;
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int leaf = ((k * CLUSTER + block) * threads + thread) / 32;
      if (leaf >= leaf_count) continue;
      if (CLUSTER > 1) {
        if (lane < CLUSTER) store_in_cluster(&leaves[turn][leaf], lane, squares[k]);
      } else if (lane == 0) {
        leaves[turn][leaf] = squares[k];
      }
    }
    if (CLUSTER > 1) cluster_meet();
    else block_meet();
    // Every thread of the block is past its last poll of this row.
    if (row + p.clusters >= static_cast<u32>(p.rows)) let_successor_start();

    float total = 0.0f;
#pragma unroll
    for (int i = 0; i < kMaxLeaves / 32; ++i) {
      const int leaf = i * 32 + lane;
      if (leaf < leaf_count) total = total + leaves[turn][leaf];
    }
#pragma unroll
    for (u32 mask = 16; mask > 0; mask /= 2) total = total + shuffle_xor(total, mask);
    turn ^= 1;  // the other half may be written while slow warps still read this one

    const float eps = p.eps_pointer == nullptr ? p.eps : load(p.eps_pointer);
    const float mean = total * p.inverse_hidden;
    const float biased = mean + eps;
    const float rstd = reciprocal_root(biased);
    const float divisor = DIVIDE_BY_ROOT ? root(biased) : 1.0f;
    const bool failed = total != total && poll_word(p.control) != 0;
    if (WANT_RSTD && block == 0 && thread == 0) p.rstd[row] = rstd;

#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int j = (k * CLUSTER + block) * threads + thread;
      if (j >= p.vectors) continue;
      const u64 at = static_cast<u64>(row) * p.hidden + static_cast<u64>(j) * kElements;
      const int left = p.hidden - j * kElements;
      if (failed) {  // all of the row, not only what this thread waited for
#pragma unroll
        for (int i = 0; i < kElements; ++i) h[k][i] = as_float(0x7fc00000u);
        if constexpr (WANT_REDUCED) write<X_DTYPE>(p.reduced, at, left, h[k]);
        if constexpr (WANT_RESIDUAL) write<HIDDEN_DTYPE>(p.residual_out, at, left, h[k]);
      }
      if constexpr (WANT_NORM) {
        float n[kElements];
#pragma unroll
        for (int i = 0; i < kElements; ++i)
          n[i] = DIVIDE_BY_ROOT ? h[k][i] / divisor : h[k][i] * rstd;
        round_to<NORM_DTYPE>(n);
        if constexpr (WEIGHT_DTYPE >= 0) {
          float w[kElements];
          widen(weight[k], w);
#pragma unroll
          for (int i = 0; i < kElements; ++i)
            n[i] = n[i] * (ONE_PLUS_WEIGHT ? 1.0f + w[i] : w[i]);
          round_to<PRODUCT_DTYPE>(n);
        }
        write<OUT_DTYPE>(p.norm, at, left, n);
      }
      if (j % kSegment == 0) {
        const u32 slot = static_cast<u32>(state[k]);
        const int rest = p.vectors - j;
        const u32 width = rest < kSegment ? rest : kSegment;
        if (was_busy) report(p, kOverlap);
        *reinterpret_cast<Words*>(p.state + row * p.row_segments + j / kSegment) =
            Words{{slot == 2 ? 0 : slot + 1, width, 0, 0}};
      }
    }
  }
  if (CLUSTER > 1 && !met) cluster_wait();
}
