// all_reduce + bias + scale + residual + RMSNorm among the ranks of one host, in one call.
//
// The memory of a group: a Header, then for each rank two slots for its own partial sums, then
// for each rank two slots for the rows it has reduced (two-shot). A call streams through the
// slots in chunks of rows, so its size has no limit. Two slots are enough: a rank writes slot
// p again two chunks later, and by then it has waited for every peer's next chunk, which a peer
// starts only when it is done reading slot p.
//
// one-shot: every rank reads all ranks' rows and does the whole row itself.
// two-shot: row i is reduced by rank i mod world, the *rounded* sum is read by all, each adds
//           its own residual and norms. The same bits, less to read for three ranks and more.
#include "cpu_barrier.h"
#include "cpu_forms.h"

#include <algorithm>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif

namespace fx_fusion {

struct Workspace {
  char* memory;
  int64_t slot_bytes;
  int32_t rank;
  int32_t world_size;
  int32_t descriptor;   // of the memory, for the liveness check; -1 for none
  uint32_t count;       // what this rank has published so far
  uint32_t chunk;       // chunks so far; its parity is the slot
  int64_t timeout_nanoseconds;
  uint64_t missing;     // after an error: bit r is set if rank r was waited for in vain

  Header& header() { return *reinterpret_cast<Header*>(memory); }
  char* slot(int owner, int which) {
    return memory + sizeof(Header) + (static_cast<int64_t>(owner) * 4 + which) * slot_bytes;
  }
  char* partial(int owner) { return slot(owner, chunk & 1); }
  char* reduced(int owner) { return slot(owner, 2 + (chunk & 1)); }
};

int64_t memory_bytes(int32_t world_size, int64_t slot_bytes) {
  return static_cast<int64_t>(sizeof(Header)) + world_size * 4LL * slot_bytes;
}

// Says that this rank's part is in place, then waits for all others.
Status meet(Workspace& space) {
  const uint32_t count = ++space.count;
  publish(space.header().ranks[space.rank], count);
  const int64_t deadline = now_nanoseconds() + space.timeout_nanoseconds;
  Status worst = kOk;
  space.missing = 0;
  for (int i = 1; i < space.world_size; ++i) {
    const int peer = (space.rank + i) % space.world_size;
    const Status status =
        wait_for(space.header(), peer, count, deadline, space.descriptor);
    if (status == kOk) continue;
    space.missing |= uint64_t{1} << peer;
    if (worst == kOk || status == kPeerDied) worst = status;
  }
  if (worst != kOk)
    space.header().ranks[space.rank].gave_up.store(1, std::memory_order_release);
  return worst;
}

template <typename Body>
void for_rows(const Call& call, int64_t first, int64_t count, Body body) {
  const int64_t padded = (call.hidden + kLanes - 1) / kLanes * kLanes;
  const int threads = static_cast<int>(std::min<int64_t>(call.threads, count));
#ifdef _OPENMP
  if (threads > 1) {
#pragma omp parallel num_threads(threads)
    {
      std::vector<float> scratch(padded);
#pragma omp for schedule(static)
      for (int64_t row = first; row < first + count; ++row) body(row, scratch.data());
    }
    return;
  }
#endif
  static thread_local std::vector<float> scratch;
  if (static_cast<int64_t>(scratch.size()) < padded) scratch.resize(padded);
  for (int64_t row = first; row < first + count; ++row) body(row, scratch.data());
}

Status one_shot_chunk(Workspace& space, const Call& call, int64_t first, int64_t rows) {
  const int64_t row_bytes = call.hidden * element_size(call.form.x_dtype);
  const char* own = static_cast<const char*>(call.x) + first * row_bytes;
  std::memcpy(space.partial(space.rank), own, rows * row_bytes);
  if (const Status status = meet(space); status != kOk) return status;
  const RowFunction run_row = row_function(call.form);
  for_rows(call, first, rows, [&](int64_t row, float* scratch) {
    const void* parts[kMaxRanks];
    for (int rank = 0; rank < space.world_size; ++rank)
      parts[rank] = space.partial(rank) + (row - first) * row_bytes;
    parts[space.rank] = static_cast<const char*>(call.x) + row * row_bytes;
    run_row(call, parts, space.world_size, row, scratch);
  });
  return kOk;
}

Status two_shot_chunk(Workspace& space, const Call& call, int64_t first, int64_t rows) {
  const int64_t row_bytes = call.hidden * element_size(call.form.x_dtype);
  const char* own = static_cast<const char*>(call.x) + first * row_bytes;
  for (int64_t row = 0; row < rows; ++row)
    if ((first + row) % space.world_size != space.rank)
      std::memcpy(
          space.partial(space.rank) + row * row_bytes, own + row * row_bytes, row_bytes);
  if (const Status status = meet(space); status != kOk) return status;
  char* target = space.reduced(space.rank);
  for_rows(call, first, rows, [&](int64_t row, float*) {
    if (row % space.world_size != space.rank) return;
    const int64_t at = (row - first) * row_bytes;
    const void* parts[kMaxRanks];
    for (int rank = 0; rank < space.world_size; ++rank) parts[rank] = space.partial(rank) + at;
    parts[space.rank] = own + at;
    reduce_row(call, parts, space.world_size, target + at);
  });
  if (const Status status = meet(space); status != kOk) return status;
  const RowFunction run_row = row_function(call.form);
  for_rows(call, first, rows, [&](int64_t row, float* scratch) {
    const void* part = space.reduced(row % space.world_size) + (row - first) * row_bytes;
    run_row(call, &part, 1, row, scratch);
  });
  return kOk;
}

Status run(Workspace& space, const Call& call) {
  const int64_t row_bytes = call.hidden * element_size(call.form.x_dtype);
  const int64_t rows_a_chunk = space.slot_bytes / row_bytes;
  for (int64_t first = 0; first < call.tokens; first += rows_a_chunk) {
    const int64_t rows = std::min(rows_a_chunk, call.tokens - first);
    ++space.chunk;
    const Status status = call.two_shot ? two_shot_chunk(space, call, first, rows)
                                        : one_shot_chunk(space, call, first, rows);
    if (status != kOk) return status;
  }
  return kOk;
}

} // namespace fx_fusion

extern "C" {

int64_t fx_fusion_cpu_memory_bytes(int32_t world_size, int64_t slot_bytes) {
  return fx_fusion::memory_bytes(world_size, slot_bytes);
}

int32_t fx_fusion_cpu_run(fx_fusion::Workspace* space, const fx_fusion::Call* call) {
  return fx_fusion::run(*space, *call);
}
}
