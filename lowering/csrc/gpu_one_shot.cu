// One-shot all_reduce + bias + scale + residual + RMSNorm: every rank sends its partial sums to
// every other, and each adds them up, all in one launch.
//
//   reduced = sum over ranks in rank order, in fp32, from +0.0, rounded to x's dtype
//   and then gpu_epilogue.h
//
// The data is its own flag (gpu_exchange.h). Who has read a place wipes it, and two slots take
// turns, so no barrier is needed at the end. "Launch m" is the m-th that uses a segment; a rank's
// launch begins its pushes when its launch before has ended and its stores are done (stream
// order; under programmatic launch, wait_for_predecessor). A peer writes in launch m+2 to the
// slot of launch m. Its launch m+1 had ended, so it had had data of this rank's launch m+1, so
// this rank's launch m had ended, and with it the read and the wipe of that slot. That holds for
// a vector that launch m+1 was too short to use as well: all of launch m had ended.
//
// The buffer is [slot of 2][source][segment][512 vectors of 16 bytes], its strides fixed when it
// was made, whatever the call. A row takes as many whole segments as it needs. Which slot is next
// is kept for each segment, in device memory, so that calls of any size mix, and so that a CUDA
// graph replays; it is equal on all ranks, as all of them make the same calls.
#include "gpu_device.h"
#include "gpu_params.h"
#include "gpu_elements.h"
#include "gpu_exchange.h"
#include "gpu_epilogue.h"

// The first row's turn is when all of a block's rows are sent. Not where a thread has many
// vectors, as registers would run out: there each row is sent in its own turn.
constexpr bool kAhead = kVectors <= 2;

// Where `source` puts a segment for `receiver`; a rank keeps no place for itself.
DEVICE Words* place(const Params& p, int receiver, int source, u32 slot, u32 segment) {
  const u32 index = source < receiver ? source : source - 1;
  const u64 at = (static_cast<u64>(slot * (kWorld - 1) + index) * p.segments + segment);
  return reinterpret_cast<Words*>(p.buffers[receiver]) + at * kSegment;
}

// To all peers: a vector of this rank's part.
DEVICE void send(const Params& p, const Words& x, u32 slot, u32 segment, u32 column) {
  const Words sent = without_marks(x);
#pragma unroll
  for (int d = 1; d < kWorld; ++d) {
    const int peer = p.rank + d < kWorld ? p.rank + d : p.rank + d - kWorld;
    push(place(p, peer, p.rank, slot, segment) + column, sent);
  }
}

DEVICE void read_part(const Params& p, const Spread& spread, u32 row, u32 (&slot)[kVectors],
                      Words (&x)[kVectors]) {
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    if (!warp_has(p, spread, k)) continue;
    const Vector v = vector_of(p, spread, row, k);
    slot[k] = load(&p.state[row * p.row_segments + v.j / kSegment].slot);
    x[k] = read_words(p.x, v.at, v.left);
  }
}

DEVICE void send_part(const Params& p, const Spread& spread, u32 row,
                      const u32 (&slot)[kVectors], const Words (&x)[kVectors]) {
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const Vector v = vector_of(p, spread, row, k);
    if (v.inside)
      send(p, x[k], slot[k], row * p.row_segments + v.j / kSegment, v.j % kSegment);
  }
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
        if (source < kWorld && source != p.rank && has_nothing(got[i])) {
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
          if (source < kWorld && source != p.rank && has_nothing(got[i]))
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

// Wipe what `gather` has read.
DEVICE void wipe(const Params& p, u32 slot, u32 segment, u32 column) {
#pragma unroll
  for (int d = 1; d < kWorld; ++d) {
    const int source = p.rank + d < kWorld ? p.rank + d : p.rank + d - kWorld;
    push(place(p, p.rank, source, slot, segment) + column, all_words(kNothing));
  }
}

// Reads what is added to a row; not 0 if another launch is at work on one of its segments.
DEVICE u32 read_inputs_of(const Params& p, const Spread& spread, u32 row, Inputs& inputs) {
  u32 was_busy = 0;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    if (!warp_has(p, spread, k)) continue;
    const Vector v = vector_of(p, spread, row, k);
    read_inputs(p, inputs, k, v);
    if (v.inside && v.j % kSegment == 0)
      was_busy |= exchange(&p.state[row * p.row_segments + v.j / kSegment].busy, 1);
  }
  return was_busy;
}

KERNEL void BOUNDS(THREADS, BLOCKS) fx_fusion_one_shot(const Params p) {
  SHARED(float, leaves, kMaxLeaves);  // two of them, [2][kMaxLeaves]
  const Spread spread{thread_index(), CLUSTER > 1 ? cluster_rank() : 0};
  Meeting meeting = begin_meeting(leaves);
  wait_for_predecessor();
  const bool broken = poll_word(p.control) != 0;
  const u32 rows = p.rows, first_row = block_index() / CLUSTER;

  for (u32 row = first_row; row < rows; row += p.clusters) {
    const u32 first = row * p.row_segments;
    Words x[kVectors];
    Inputs inputs;
    u32 slot[kVectors];
    u32 was_busy;

    read_part(p, spread, row, slot, x);
    const bool has_more = kAhead && row == first_row && row + p.clusters < rows;
    if (!has_more) was_busy = read_inputs_of(p, spread, row, inputs);
    if (!broken && (!kAhead || row == first_row)) send_part(p, spread, row, slot, x);
    if (has_more) {
      // The parts of the block's other rows travel while it is at work on this one.
#pragma unroll 1
      for (u32 next = row + p.clusters; !broken && next < rows; next += p.clusters) {
        Words next_x[kVectors];
        u32 next_slot[kVectors];
        read_part(p, spread, next, next_slot, next_x);
        send_part(p, spread, next, next_slot, next_x);
      }
      was_busy = read_inputs_of(p, spread, row, inputs);  // not held meanwhile: registers
    }

    float h[kVectors][kElements];
    float squares[kVectors];
    const float scale = read_scale(p);
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      squares[k] = 0.0f;
      if (!warp_has(p, spread, k)) continue;
      const Vector v = vector_of(p, spread, row, k);
      const u32 segment = first + v.j / kSegment;
      if (broken || !gather(p, x[k], slot[k], segment, v.j % kSegment, h[k]))
        fill_with_nan(h[k]);
      squares[k] = add_steps(p, inputs, k, v, scale, h[k]);
    }
    const bool last = row + p.clusters >= rows;
    const float total = add_up(p, spread, meeting, squares, last);
    // Not before the meeting: threads beyond the row's end have polled what its last one wipes.
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const Vector v = vector_of(p, spread, row, k);
      if (!broken && v.inside) wipe(p, slot[k], first + v.j / kSegment, v.j % kSegment);
    }
    normalise(p, spread, inputs, row, total, h);

#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const Vector v = vector_of(p, spread, row, k);
      if (!v.inside || v.j % kSegment != 0) continue;
      if (was_busy) report(p, kOverlap);
      p.state[first + v.j / kSegment] = State{slot[k] ^ 1u, 0, {0, 0}};
    }
  }
  end_meeting(meeting);
}
