// Two-shot all_reduce + bias + scale + residual + RMSNorm, for three ranks or more. A row is added
// up by its owner alone, rank row mod world:
//
//   scatter: every rank sends its part of the row to the owner
//   reduced = sum over ranks in rank order, in fp32, from +0.0, rounded to x's dtype: the owner
//   gather:  the owner sends the rounded sum to every rank
//   and then gpu_epilogue.h: every rank, with its own residual
//
// A rank sends 2 (W-1) / W of its data where one-shot sends W-1 times all of it, for one hop more.
//
// The data is its own flag (gpu_exchange.h). Who has read a place wipes it.
//
// Places are fixed when the workspace is made, whatever the call. Of row r the segment k has the
// number s = (r / W) * (segments of a row) + k with owner r mod W, and the owner of a place never
// changes:
//   scatter [slot of 2][source][s][512 vectors], received by the owner
//   gather  [owner][s][512 vectors], received by the others
// Which of the two slots is next is kept for each (owner, s), in device memory, equal on all
// ranks as all of them make the same calls.
//
// Why no barrier is needed at the end. "Launch m" is the m-th that uses a given (owner, s); on
// one rank a launch begins its pushes when the one before has ended and its stores are done
// (stream order; under programmatic launch, wait_for_predecessor).
// * A gather vector at rank j is written by the owner in launch m+1 once it has the same vector
//   of j's scatter of launch m+1. j sent that after its launch m had ended, and with it the read
//   and the wipe of that place. One slot is enough.
// * A scatter place at the owner is written by rank i in launch m+2, in the slot of launch m. i's
//   launch m+1 had ended, so i had a gather vector of the owner's launch m+1, so the owner's
//   launch m had ended, and with it the read and the wipe of that slot. With one slot i would
//   only know that launch m's sum had been sent, not that the wipe by its side was done. That
//   holds for a vector that launch m+1 was too short to use as well: launch m had ended.
//
// Why nobody waits for ever. A launch's blocks are all on the GPU at once. A block sends all its
// scatter before it waits for anything, then treats its own rows, which need the peers' scatter
// alone, then the others', which need an owner's block that waits for scatter alone. A wait for
// scatter ends after the timeout; the owner then sends "failed" with the missing ranks in place of
// the sum. A wait for gather ends after twice that, as the owner may wait once itself.
#include "gpu_device.h"
#include "gpu_params.h"
#include "gpu_elements.h"
#include "gpu_exchange.h"
#include "gpu_epilogue.h"

// Where `source` puts its part of a segment for its owner; a rank keeps no place for itself.
DEVICE Words* scatter_place(const Params& p, int owner, int source, u32 slot, u32 segment) {
  const u32 index = source < owner ? source : source - 1;
  const u64 at = static_cast<u64>(slot * (kWorld - 1) + index) * p.segments + segment;
  return reinterpret_cast<Words*>(p.buffers[owner]) + at * kSegment;
}

// Where `owner` puts a segment's sum for `receiver`.
DEVICE Words* gather_place(const Params& p, int receiver, int owner, u32 segment) {
  const u32 index = owner < receiver ? owner : owner - 1;
  const u64 at = static_cast<u64>(2 * (kWorld - 1) + index) * p.segments + segment;
  return reinterpret_cast<Words*>(p.buffers[receiver]) + at * kSegment;
}

DEVICE void send_to_all(const Params& p, u32 segment, u32 column, Words v) {
#pragma unroll
  for (int d = 1; d < kWorld; ++d) {
    const int peer = p.rank + d < kWorld ? p.rank + d : p.rank + d - kWorld;
    push(gather_place(p, peer, p.rank, segment) + column, v);
  }
}

// Say which ranks were waited for in vain, a bit for each.
DEVICE void report_missing(const Params& p, u32 ranks) {
#pragma unroll
  for (int r = 0; r < kWorld; ++r)
    if (ranks >> r & 1u) push_word(p.host + 1 + r, 1);
  report(p, kPeerTimeout);
}

// Of a row of another owner: send this rank's part.
DEVICE void scatter(const Params& p, const Spread& spread, u32 row) {
  const int owner = row % kWorld;
  const u32 first = row / kWorld * p.row_segments;
  Words x[kVectors];
  u32 slot[kVectors];
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    if (!warp_has(p, spread, k)) continue;
    const Vector v = vector_of(p, spread, row, k);
    slot[k] = load(&p.state[owner * p.segments + first + v.j / kSegment].slot);
    x[k] = read_words(p.x, v.at, v.left);
  }
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const Vector v = vector_of(p, spread, row, k);
    if (!v.inside) continue;
    push(scatter_place(p, owner, p.rank, slot[k], first + v.j / kSegment) + v.j % kSegment,
         without_marks(x[k]));
  }
}

// Of an own row: the sum over ranks, in rank order; if `sends`, it goes, rounded, to the others.
// False if a peer's part didn't come in time.
DEVICE bool reduce(const Params& p, const Words& own, u32 slot, u32 segment, u32 column,
                   bool sends, float (&sum)[kElements]) {
  const Words* mine = scatter_place(p, p.rank, p.rank == 0 ? 1 : 0, slot, segment) + column;
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
      u32 missing = 0;
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        const int source = first + i;
        if (source < kWorld && source != p.rank && has_nothing(got[i])) {
          got[i] = poll(mine + (source - (source > p.rank)) * stride);
          missing |= 1u << source;
        }
      }
      if (missing == 0) break;
      const Look found = look(p, patience, p.timeout);
      if (found == kGoOn) continue;
      if (found == kLate) {
        if (sends) send_to_all(p, segment, column, all_words(kFailed | missing));
        report_missing(p, missing);
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
  if (sends) send_to_all(p, segment, column, without_marks(narrow_words(sum)));
  return true;
}

// Of a row of another owner: its rounded sum. False if it didn't come.
DEVICE bool receive(const Params& p, int owner, u32 segment, u32 column,
                    float (&sum)[kElements]) {
  const Words* mine = gather_place(p, p.rank, owner, segment) + column;
  Words got = poll(mine);
  Patience patience;
  while (has_nothing(got)) {
    got = poll(mine);
    const Look found = look(p, patience, 2 * p.timeout);
    if (found == kGoOn || !has_nothing(got)) continue;
    if (found == kLate) report_missing(p, 1u << owner);
    return false;
  }
  if (got.w[0] >= kFailed) {
    report_missing(p, got.w[0] & 0xffffu);
    return false;
  }
  widen_words(got, sum);
  return true;
}

// Wipe what `reduce` or `receive` has read.
DEVICE void wipe(const Params& p, bool own, int owner, u32 slot, u32 segment, u32 column) {
  const Words nothing = all_words(kNothing);
  if (!own) {
    push(gather_place(p, p.rank, owner, segment) + column, nothing);
    return;
  }
#pragma unroll
  for (int d = 1; d < kWorld; ++d) {
    const int source = p.rank + d < kWorld ? p.rank + d : p.rank + d - kWorld;
    push(scatter_place(p, p.rank, source, slot, segment) + column, nothing);
  }
}

KERNEL void BOUNDS(THREADS, BLOCKS) fx_fusion_two_shot(const Params p) {
  SHARED(float, leaves, kMaxLeaves);  // two of them, [2][kMaxLeaves]
  const Spread spread{thread_index(), CLUSTER > 1 ? cluster_rank() : 0};
  Meeting meeting = begin_meeting(leaves);
  wait_for_predecessor();
  const bool broken = poll_word(p.control) != 0;
  const u32 rows = p.rows, first_row = block_index() / CLUSTER;

  if (!broken) {
    for (u32 row = first_row; row < rows; row += p.clusters)
      if (row % kWorld != static_cast<u32>(p.rank)) scatter(p, spread, row);
  }
  const float scale = read_scale(p);
  u32 to_do = (rows - first_row + p.clusters - 1) / p.clusters;  // a launch has no idle blocks
#pragma unroll 1
  for (u32 pass = 0; pass < 2; ++pass) {
#pragma unroll 1
    for (u32 row = first_row; row < rows; row += p.clusters) {
      const int owner = row % kWorld;
      const bool own = owner == p.rank;
      if (own != (pass == 0)) continue;  // own rows first: the others wait for them
      const u32 first = row / kWorld * p.row_segments;
      Words x[kVectors];
      Inputs inputs;
      u32 slot[kVectors];
      u32 was_busy = 0;

#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        if (!warp_has(p, spread, k)) continue;
        const Vector v = vector_of(p, spread, row, k);
        State* const state = &p.state[owner * p.segments + first + v.j / kSegment];
        const bool begins = v.inside && v.j % kSegment == 0;
        if (own || begins) slot[k] = load(&state->slot);
        if (own) x[k] = read_words(p.x, v.at, v.left);
        read_inputs(p, inputs, k, v);
        if (begins) was_busy |= exchange(&state->busy, 1);
      }

      float h[kVectors][kElements];
      float squares[kVectors];
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        squares[k] = 0.0f;
        if (!warp_has(p, spread, k)) continue;
        const Vector v = vector_of(p, spread, row, k);
        const u32 segment = first + v.j / kSegment, column = v.j % kSegment;
        bool good = !broken;
        if (good && own) good = reduce(p, x[k], slot[k], segment, column, v.inside, h[k]);
        else if (good) good = receive(p, owner, segment, column, h[k]);
        if (!good) fill_with_nan(h[k]);
        squares[k] = add_steps(p, inputs, k, v, scale, h[k]);
      }
      const float total = add_up(p, spread, meeting, squares, --to_do == 0);
      // Not before the meeting: threads beyond the row's end have polled what its last one wipes.
#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        const Vector v = vector_of(p, spread, row, k);
        if (!broken && v.inside)
          wipe(p, own, owner, slot[k], first + v.j / kSegment, v.j % kSegment);
      }
      normalise(p, spread, inputs, row, total, h);

#pragma unroll
      for (int k = 0; k < kVectors; ++k) {
        const Vector v = vector_of(p, spread, row, k);
        if (!v.inside || v.j % kSegment != 0) continue;
        if (was_busy) report(p, kOverlap);
        p.state[owner * p.segments + first + v.j / kSegment] = State{slot[k] ^ 1u, 0, {0, 0}};
      }
    }
  }
  end_meeting(meeting);
}
