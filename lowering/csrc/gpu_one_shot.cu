// One-shot all_reduce + bias + scale + residual + RMSNorm: every rank sends its partial sums to
// every other, and each adds them up, all in one launch.
//
//   reduced = sum over ranks in rank order, in fp32, from +0.0, rounded to x's dtype
//   and then gpu_epilogue.h
//
// The data is its own flag. A rank's receive buffer holds -0.0 wherever nothing has arrived; a
// sender turns its own -0.0 into +0.0, which changes no sum that starts from +0.0. A reader polls
// every element that it needs until none is -0.0. Three slots take turns, so no barrier is needed
// at the end: a use reads slot s and wipes slot s-1. A peer writes slot s-1 again two uses later,
// and by then it has had this rank's data of the next use, sent when the launch that wiped had
// ended.
//
// The buffer is [slot][source][segment][512 vectors of 16 bytes], its strides fixed when it was
// made, whatever the call. A row takes as many whole segments as it needs. Slot and extent of a
// segment's last use are kept per segment, in device memory, so that calls of any size mix, and
// so that a CUDA graph replays. 16- and 32-bit elements have buffers of their own.
#include "gpu_device.h"
#include "gpu_params.h"
#include "gpu_elements.h"
#include "gpu_exchange.h"
#include "gpu_epilogue.h"

// What marks a place where nothing has arrived.
constexpr u32 kEmpty = X_DTYPE == kFloat32 ? 0x80000000u : 0x80008000u;

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
    Patience patience;
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
      const Look found = look(p, patience, p.timeout);
      if (found == kGoOn) continue;
      if (found == kLate) {
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
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      if (first + i >= kWorld) continue;
      float v[kElements];
      widen_words(got[i], v);
#pragma unroll
      for (int k = 0; k < kElements; ++k) sum[k] = sum[k] + v[k];
    }
  }
  return true;
}

KERNEL void BOUNDS(THREADS, BLOCKS) fx_fusion_one_shot(const Params p) {
  SHARED(float, leaves, kMaxLeaves);  // two of them, [2][kMaxLeaves]
  const Spread spread{thread_index(), CLUSTER > 1 ? cluster_rank() : 0};
  Meeting meeting = begin_meeting(leaves);
  wait_for_predecessor();
  const bool broken = poll_word(p.control) != 0;

  for (u32 row = block_index() / CLUSTER; row < static_cast<u32>(p.rows); row += p.clusters) {
    Words x[kVectors];
    Inputs inputs;
    u64 state[kVectors];  // slot in the low word, extent in the high
    u32 was_busy = 0;

#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int j = vector_of(spread, k);
      if (j >= p.vectors) continue;
      const u32 segment = row * p.row_segments + j / kSegment;
      state[k] = load(reinterpret_cast<const u64*>(p.state + segment));
      const u64 at = static_cast<u64>(row) * p.hidden + static_cast<u64>(j) * kElements;
      x[k] = read_words(p.x, at, p.hidden - j * kElements);
    }
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int j = vector_of(spread, k);
      if (j >= p.vectors) continue;
      const u64 at = static_cast<u64>(row) * p.hidden + static_cast<u64>(j) * kElements;
      const int left = p.hidden - j * kElements;
      read_inputs(p, inputs, k, j, at, left);
      if (j % kSegment == 0)
        was_busy |= exchange(&p.state[row * p.row_segments + j / kSegment].busy, 1);
    }

    if (!broken) {
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        const int j = vector_of(spread, k);
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
    }

    float h[kVectors][kElements];
    float squares[kVectors];
    const float scale = read_scale(p);
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int j = vector_of(spread, k);
      squares[k] = 0.0f;
      if (j >= p.vectors) continue;
      const u32 segment = row * p.row_segments + j / kSegment;
      const u64 at = static_cast<u64>(row) * p.hidden + static_cast<u64>(j) * kElements;
      const int left = p.hidden - j * kElements;
      if (broken || !gather(p, x[k], static_cast<u32>(state[k]), segment, j % kSegment, h[k]))
        fill_with_nan(h[k]);
      squares[k] = add_steps(p, inputs, k, at, left, scale, h[k]);
    }
    if (!broken) {
      // Wipe what the segment's last use received, all of it, however long this use is. Not
      // before the data is there, as its way is shared.
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        const int j = vector_of(spread, k);
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
    const bool last = row + p.clusters >= static_cast<u32>(p.rows);
    const float total = add_up(p, spread, meeting, squares, last);
    normalise(p, spread, inputs, row, total, h);

#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int j = vector_of(spread, k);
      if (j >= p.vectors || j % kSegment != 0) continue;
      const u32 slot = static_cast<u32>(state[k]);
      const int rest = p.vectors - j;
      const u32 width = rest < kSegment ? rest : kSegment;
      if (was_busy) report(p, kOverlap);
      *reinterpret_cast<Words*>(p.state + row * p.row_segments + j / kSegment) =
          Words{{slot == 2 ? 0 : slot + 1, width, 0, 0}};
    }
  }
  end_meeting(meeting);
}
