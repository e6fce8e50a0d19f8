// Bias + scale + residual + RMSNorm of a tensor that is reduced already: what follows the group's
// own all_reduce, as one launch. The steps and the tree of the sum of squares are those of the
// kernels that exchange, so the bits are too.
#include "gpu_device.h"
#include "gpu_params.h"
#include "gpu_elements.h"
#include "gpu_epilogue.h"

KERNEL void BOUNDS(THREADS, BLOCKS) fx_fusion_local(const Params p) {
  SHARED(float, leaves, kMaxLeaves);  // two of them, [2][kMaxLeaves]
  const Spread spread{thread_index(), CLUSTER > 1 ? cluster_rank() : 0};
  Meeting meeting = begin_meeting(leaves);
  wait_for_predecessor();
  const float scale = read_scale(p);

  for (u32 row = block_index() / CLUSTER; row < static_cast<u32>(p.rows); row += p.clusters) {
    Words x[kVectors];
    Inputs inputs;
    float h[kVectors][kElements];
    float squares[kVectors];
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (!warp_has(p, spread, k)) continue;
      const Vector v = vector_of(p, spread, row, k);
      x[k] = read_words(p.x, v.at, v.left);
      read_inputs(p, inputs, k, v);
    }
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      squares[k] = 0.0f;
      if (!warp_has(p, spread, k)) continue;
      const Vector v = vector_of(p, spread, row, k);
      widen_words(x[k], h[k]);
      squares[k] = add_steps(p, inputs, k, v, scale, h[k]);
    }
    const bool last = row + p.clusters >= static_cast<u32>(p.rows);
    const float total = add_up(p, spread, meeting, squares, last);
    normalise(p, spread, inputs, row, total, h);
  }
  end_meeting(meeting);
}
