// From the reduced row to the results, the same for every kernel, so that which one ran never
// changes a bit:
//
//   h       = reduced [-> add_dtype] [+ bias] [* scale] [residual +], rounded at each step
//   norm    = h * rsqrt(mean(h^2) + eps) [-> norm_dtype] [* weight] -> out_dtype
//
// The sum of squares has one tree per (hidden size, x's dtype): 32 vectors are a leaf, added up
// within a warp; leaf l goes to lane l mod 32; the lanes are added pairwise. How many blocks
// share a row plays no part: they exchange leaves. (No guard, as gpu_params.h says.)

// A thread's place among those that share a row.
struct Spread {
  u32 thread, block;
};

// The thread's k-th vector of a row.
struct Vector {
  int j;        // its number within the row
  bool inside;  // the row has it; else `j` is the row's last, and nothing may be stored
  u64 at;       // its first element in an array of rows
  int left;     // elements from there to the row's end
};

DEVICE int number_of(const Spread& spread, int k) {
  return (k * CLUSTER + spread.block) * THREADS + spread.thread;
}

// False if no thread of the warp has a k-th vector. Warps skip as a whole: in the row's last one
// the threads beyond the end go along, as a warp that parts costs more than what they do.
DEVICE bool warp_has(const Params& p, const Spread& spread, int k) {
  return number_of(spread, k) - static_cast<int>(spread.thread % 32) < p.vectors;
}

DEVICE Vector vector_of(const Params& p, const Spread& spread, u32 row, int k) {
  const int number = number_of(spread, k);
  const bool inside = number < p.vectors;
  const int j = inside ? number : p.vectors - 1;
  return Vector{j, inside, static_cast<u64>(row) * p.hidden + static_cast<u64>(j) * kElements,
                p.hidden - j * kElements};
}

// A thread's share of what is added to a row and multiplied with it.
struct Inputs {
  Tile<RESIDUAL_DTYPE> residual[kVectors];
  Tile<WEIGHT_DTYPE> weight[kVectors];
  Tile<BIAS_DTYPE> bias[kVectors];
};

DEVICE void read_inputs(const Params& p, Inputs& inputs, int k, const Vector& v) {
  read(inputs.residual[k], p.residual, v.at, v.left);
  read(inputs.weight[k], p.weight, static_cast<u64>(v.j) * kElements, v.left);
  read(inputs.bias[k], p.bias, static_cast<u64>(v.j) * kElements, v.left);
}

DEVICE float read_scale(const Params& p) {
  return !HAS_SCALE || p.scale_pointer == nullptr ? p.scale : load(p.scale_pointer);
}

// Turns the sum over ranks, in `h`, into the hidden state; returns the sum of its squares.
DEVICE float add_steps(const Params& p, const Inputs& inputs, int k, const Vector& v,
                       float scale, float (&h)[kElements]) {
  float sum = 0.0f;
  float other[kElements];
  round_to<X_DTYPE>(h);
  if (WANT_REDUCED && v.inside) write<X_DTYPE>(p.reduced, v.at, v.left, h);
  if constexpr (CAST_DTYPE != X_DTYPE) round_to<CAST_DTYPE>(h);
  if constexpr (BIAS_DTYPE >= 0) {
    widen(inputs.bias[k], other);
#pragma unroll
    for (int i = 0; i < kElements; ++i) h[i] = h[i] + other[i];
    round_to<BIAS_OUT_DTYPE>(h);
  }
  if constexpr (HAS_SCALE) {
#pragma unroll
    for (int i = 0; i < kElements; ++i) h[i] = h[i] * scale;
    round_to<BIAS_OUT_DTYPE>(h);
  }
  if constexpr (RESIDUAL_DTYPE >= 0) {
    widen(inputs.residual[k], other);
#pragma unroll
    for (int i = 0; i < kElements; ++i) h[i] = other[i] + h[i];
    round_to<HIDDEN_DTYPE>(h);
  }
  if (WANT_RESIDUAL && v.inside) write<HIDDEN_DTYPE>(p.residual_out, v.at, v.left, h);
#pragma unroll
  for (int i = 0; i < kElements; ++i)
    if (ALIGNED || i < v.left) sum = sum + h[i] * h[i];
  return v.inside ? sum : 0.0f;
}

DEVICE void fill_with_nan(float (&v)[kElements]) {
#pragma unroll
  for (int i = 0; i < kElements; ++i) v[i] = as_float(0x7fc00000u);
}

// Where the threads that share a row meet, once a row.
struct Meeting {
  float (*leaves)[kMaxLeaves];  // two rows, used in turn
  u32 turn;
  bool met;
};

DEVICE Meeting begin_meeting(float (*leaves)[kMaxLeaves]) {
  if (CLUSTER > 1) cluster_arrive_relaxed();  // so that no store meets a block not yet started
  return Meeting{leaves, 0, false};
}

// For a block that had no row.
DEVICE void end_meeting(const Meeting& meeting) {
  if (CLUSTER > 1 && !meeting.met) cluster_wait();
}

// The row's sum of squares from each thread's. With `last` the next kernel may start: every
// thread of the block is past its last poll.
DEVICE float add_up(const Params& p, const Spread& spread, Meeting& meeting,
                    float (&squares)[kVectors], bool last) {
  const u32 lane = spread.thread % 32;
  const int leaf_count = (p.vectors + 31) / 32;
  float* const leaves = meeting.leaves[meeting.turn];
  // A leaf is the sum over one warp's 32 vectors.
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    float sum = squares[k];
#pragma unroll
    for (u32 mask = 16; mask > 0; mask /= 2) sum = sum + shuffle_xor(sum, mask);
    squares[k] = sum;
  }
  if (CLUSTER > 1 && !meeting.met) cluster_wait();
  meeting.met = true;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const int leaf = number_of(spread, k) / 32;
    if (leaf >= leaf_count) continue;
    if (CLUSTER > 1) {
      if (lane < CLUSTER) store_in_cluster(&leaves[leaf], lane, squares[k]);
    } else if (lane == 0) {
      leaves[leaf] = squares[k];
    }
  }
  if (CLUSTER > 1) cluster_meet();
  else block_meet();
  if (last) let_successor_start();

  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < kMaxLeaves / 32; ++i) {
    const int leaf = i * 32 + lane;
    if (leaf < leaf_count) total = total + leaves[leaf];
  }
#pragma unroll
  for (u32 mask = 16; mask > 0; mask /= 2) total = total + shuffle_xor(total, mask);
  meeting.turn ^= 1;  // the other half may be written while slow warps still read this one
  return total;
}

// Writes the norm of a row whose hidden state is in `h`, and its reciprocal root.
DEVICE void normalise(const Params& p, const Spread& spread, const Inputs& inputs, u32 row,
                      float total, float (&h)[kVectors][kElements]) {
  const float eps = p.eps_pointer == nullptr ? p.eps : load(p.eps_pointer);
  const float mean = total * p.inverse_hidden;
  const float biased = mean + eps;
  const float rstd = reciprocal_root(biased);
  const float divisor = DIVIDE_BY_ROOT ? root(biased) : 1.0f;
  const bool failed = kWorld > 1 && total != total && poll_word(p.control) != 0;
  if (WANT_RSTD && spread.block == 0 && spread.thread == 0) p.rstd[row] = rstd;

#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    if (!warp_has(p, spread, k)) continue;
    const Vector v = vector_of(p, spread, row, k);
    if (failed) {  // all of the row, not only what this thread waited for
      fill_with_nan(h[k]);
      if (WANT_REDUCED && v.inside) write<X_DTYPE>(p.reduced, v.at, v.left, h[k]);
      if (WANT_RESIDUAL && v.inside) write<HIDDEN_DTYPE>(p.residual_out, v.at, v.left, h[k]);
    }
    if constexpr (WANT_NORM) {
      float n[kElements];
#pragma unroll
      for (int i = 0; i < kElements; ++i)
        n[i] = DIVIDE_BY_ROOT ? h[k][i] / divisor : h[k][i] * rstd;
      round_to<NORM_DTYPE>(n);
      if constexpr (WEIGHT_DTYPE >= 0) {
        float w[kElements];
        widen(inputs.weight[k], w);
#pragma unroll
        for (int i = 0; i < kElements; ++i)
          n[i] = n[i] * (ONE_PLUS_WEIGHT ? 1.0f + w[i] : w[i]);
        round_to<PRODUCT_DTYPE>(n);
      }
      if (v.inside) write<OUT_DTYPE>(p.norm, v.at, v.left, n);
    }
  }
}
