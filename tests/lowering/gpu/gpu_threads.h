// The GPU kernels' source as threads of one process, for ThreadSanitizer: takes the place of
// gpu_emulator.h.
//
// A cluster of blocks is a thread of the system; its GPU threads are fibers that the sanitizer
// knows. A switch from fiber to fiber orders nothing, nor does a shuffle: only what orders
// memory on a GPU does, which is a barrier of the block or the cluster, and the end of a launch.
// Pushes and polls are relaxed atomics of 32 bits, in random order.
#pragma once

#include <sanitizer/tsan_interface.h>
#include <sched.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

namespace threads {

inline int mutant = 0;  // which rule of the protocol is broken, 0 for none

constexpr size_t kStack = 128 * 1024;

struct Barrier {
  unsigned needed = 0;
  std::atomic<unsigned> arrived{0}, phase{0};
  char order[2];  // of two phases, for the sanitizer
};

struct Warp {
  Barrier barrier;
  std::atomic<float> values[2][32];
};

struct Block {
  unsigned index = 0, rank_in_cluster = 0;
  Barrier barrier;
  std::unique_ptr<Warp[]> warps;
  alignas(16) char shared[2][512];
};

struct Cluster;

struct Fiber {
  ucontext_t context;
  void* stack = nullptr;
  void* sanitizer = nullptr;
  Cluster* cluster = nullptr;
  Block* block = nullptr;
  unsigned index = 0, cluster_phase = 0, shuffles = 0;
  std::minstd_rand random;
  std::atomic<bool> done{true};
  std::atomic<Barrier*> waiting{nullptr};
  std::atomic<unsigned> phase{0};  // that it waits to end
};

// The thread of one cluster; its fibers are used again by every launch.
struct Cluster {
  Barrier barrier;
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<std::unique_ptr<Fiber>> fibers;
  ucontext_t scheduler;
  void* sanitizer = nullptr;
  std::minstd_rand random;
  void (*kernel)(const void*) = nullptr;
  const void* params = nullptr;
};

inline thread_local std::atomic<Fiber*> running{nullptr};

inline Fiber& fiber() { return *running.load(std::memory_order_relaxed); }

// Leave the fiber for the scheduler of its thread.
inline void park(unsigned flags = __tsan_switch_to_fiber_no_sync) {
  Fiber& own = fiber();
  __tsan_switch_to_fiber(own.cluster->sanitizer, flags);
  swapcontext(&own.context, &own.cluster->scheduler);
}

inline bool chance(unsigned percent) { return fiber().random() % 100 < percent; }
inline void maybe_yield(unsigned percent) {
  if (chance(percent)) park();
}

inline unsigned arrive(Barrier& barrier) {
  const unsigned before = barrier.phase.load(std::memory_order_relaxed);
  if (barrier.arrived.fetch_add(1, std::memory_order_relaxed) + 1 == barrier.needed) {
    barrier.arrived.store(0, std::memory_order_relaxed);
    barrier.phase.store(before + 1, std::memory_order_relaxed);
  }
  return before;
}
inline void wait(Barrier& barrier, unsigned before) {
  Fiber& own = fiber();
  own.phase.store(before, std::memory_order_relaxed);
  own.waiting.store(&barrier, std::memory_order_relaxed);
  while (barrier.phase.load(std::memory_order_relaxed) == before) park();
  own.waiting.store(nullptr, std::memory_order_relaxed);
}

inline void fiber_main() {
  while (true) {
    Fiber& own = fiber();
    own.cluster->kernel(own.cluster->params);
    own.done.store(true, std::memory_order_relaxed);
    park(0);  // the end of a launch orders memory
  }
}

inline void enter(Cluster& cluster, Fiber& fiber, unsigned flags) {
  running.store(&fiber, std::memory_order_relaxed);
  __tsan_switch_to_fiber(fiber.sanitizer, flags);
  swapcontext(&cluster.scheduler, &fiber.context);
}

// Of the calling thread: a cluster of blocks that have room for so many GPU threads.
inline void prepare(Cluster& cluster, unsigned blocks, unsigned most_threads, unsigned seed) {
  cluster.random.seed(seed);
  cluster.sanitizer = __tsan_get_current_fiber();
  for (unsigned b = 0; b < blocks; ++b) {
    cluster.blocks.push_back(std::make_unique<Block>());
    cluster.blocks[b]->warps = std::make_unique<Warp[]>(most_threads / 32);
  }
  for (unsigned i = 0; i < blocks * most_threads; ++i) {
    cluster.fibers.push_back(std::make_unique<Fiber>());
    Fiber& made = *cluster.fibers.back();
    made.cluster = &cluster;
    made.random.seed(cluster.random());
    made.sanitizer = __tsan_create_fiber(0);
    made.stack = mmap(nullptr, kStack, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (made.stack == MAP_FAILED) std::abort();
    getcontext(&made.context);
    made.context.uc_stack.ss_sp = made.stack;
    made.context.uc_stack.ss_size = kStack;
    made.context.uc_link = nullptr;
    makecontext(&made.context, fiber_main, 0);
  }
}

inline void release(Cluster& cluster) {
  for (auto& fiber : cluster.fibers) {
    __tsan_destroy_fiber(fiber->sanitizer);
    munmap(fiber->stack, kStack);
  }
}

// Run the kernel in the cluster with this number.
inline void run(Cluster& cluster, unsigned number, unsigned size, unsigned threads,
                void (*kernel)(const void*), const void* params) {
  cluster.kernel = kernel;
  cluster.params = params;
  cluster.barrier.needed = size * threads;
  std::vector<Fiber*> left;
  for (unsigned b = 0; b < size; ++b) {
    Block& block = *cluster.blocks[b];
    block.index = number * size + b;
    block.rank_in_cluster = b;
    block.barrier.needed = threads;
    std::memset(block.shared, 0xff, sizeof block.shared);  // NaN
    for (unsigned w = 0; w < threads / 32; ++w) block.warps[w].barrier.needed = 32;
    for (unsigned t = 0; t < threads; ++t) {
      Fiber& fiber = *cluster.fibers[b * threads + t];
      fiber.block = &block;
      fiber.index = t;
      fiber.shuffles = 0;
      fiber.done.store(false, std::memory_order_relaxed);
      enter(cluster, fiber, 0);  // the start of a launch orders memory
      if (!fiber.done.load(std::memory_order_relaxed)) left.push_back(&fiber);
    }
  }
  for (unsigned turn = 0; !left.empty(); ++turn) {
    if (turn % 64 == 0) sched_yield();
    const size_t i = cluster.random() % left.size();
    Fiber& fiber = *left[i];
    const Barrier* barrier = fiber.waiting.load(std::memory_order_relaxed);
    if (barrier && barrier->phase.load(std::memory_order_relaxed) ==
                       fiber.phase.load(std::memory_order_relaxed))
      continue;
    enter(cluster, fiber, __tsan_switch_to_fiber_no_sync);
    if (fiber.done.load(std::memory_order_relaxed)) {
      left[i] = left.back();
      left.pop_back();
    }
  }
}

}  // namespace threads

// ---- what the kernels' sources ask for ----------------------------------------------------

#define DEVICE static inline
#define KERNEL static
#define BOUNDS(threads, blocks)
#define SHARED(type, name, count) \
  type(*name)[count] = reinterpret_cast<type(*)[count]>(threads::fiber().block->shared)

DEVICE u32 thread_index() { return threads::fiber().index; }
DEVICE u32 block_index() { return threads::fiber().block->index; }
DEVICE u32 cluster_rank() { return threads::fiber().block->rank_in_cluster; }

template <typename T>
DEVICE T load(const T* p) {
  threads::maybe_yield(2);
  return *p;
}
DEVICE u32 poll_word(const u32* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
DEVICE void push_word(u32* p, u32 v) {
  if (threads::mutant == 1) *p = v;
  else __atomic_store_n(p, v, __ATOMIC_RELAXED);
}
DEVICE Words poll(const Words* p) {
  threads::maybe_yield(30);
  Words v;
  const u32 first = threads::fiber().random();
  for (u32 k = 0; k < 4; ++k) v.w[(first + k) % 4] = poll_word(&p->w[(first + k) % 4]);
  return v;
}
DEVICE void push(Words* p, Words v) {
  const u32 first = threads::fiber().random();
  for (u32 k = 0; k < 4; ++k) {
    push_word(&p->w[(first + k) % 4], v.w[(first + k) % 4]);
    threads::maybe_yield(2);
  }
}
DEVICE u32 exchange(u32* p, u32 v) { return __atomic_exchange_n(p, v, __ATOMIC_RELAXED); }
DEVICE void fence_system() {}
DEVICE u64 nanoseconds() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}
DEVICE void wait_for_predecessor() {}  // a launch starts when the one before has ended
DEVICE void let_successor_start() {}

// Who waits has seen what was written before the others arrived.
DEVICE void meet(threads::Barrier& barrier) {
  const unsigned phase = barrier.phase.load(std::memory_order_relaxed);
  __tsan_release(&barrier.order[phase & 1]);
  threads::wait(barrier, threads::arrive(barrier));
  __tsan_acquire(&barrier.order[phase & 1]);
}
DEVICE void block_meet() { meet(threads::fiber().block->barrier); }
DEVICE void cluster_arrive_relaxed() {
  threads::fiber().cluster_phase = threads::arrive(threads::fiber().cluster->barrier);
}
DEVICE void cluster_wait() {
  threads::wait(threads::fiber().cluster->barrier, threads::fiber().cluster_phase);
}
DEVICE void cluster_meet() { meet(threads::fiber().cluster->barrier); }
DEVICE void store_in_cluster(float* p, u32 number, float v) {
  const threads::Fiber& own = threads::fiber();
  const size_t offset = reinterpret_cast<char*>(p) - &own.block->shared[0][0];
  *reinterpret_cast<float*>(&own.cluster->blocks[number]->shared[0][0] + offset) = v;
}
DEVICE float shuffle_xor(float v, u32 mask) {
  threads::Fiber& own = threads::fiber();
  threads::Warp& warp = own.block->warps[own.index / 32];
  const unsigned turn = own.shuffles++ & 1, lane = own.index % 32;
  warp.values[turn][lane].store(v, std::memory_order_relaxed);
  threads::wait(warp.barrier, threads::arrive(warp.barrier));
  return warp.values[turn][lane ^ mask].load(std::memory_order_relaxed);
}

#include "host_numbers.h"
