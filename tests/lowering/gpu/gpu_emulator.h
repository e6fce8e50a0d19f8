// GPU threads of all ranks as fibers of one process, so that the GPU kernel's source runs, with
// its real protocol, on a machine without a GPU.
//
// A scheduler picks the next fiber at random. What goes to other ranks (push) becomes visible one
// 32-bit word at a time, in random order, at the latest when the launch ends. A launch may start
// as soon as every block of the one before has allowed it; its inputs are written only when that
// one has ended. So reading too early, wiping too little or polling too few words shows.
#pragma once

#include <sys/mman.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <random>
#include <utility>
#include <vector>

namespace emulator {

struct Thread;

struct Barrier {
  unsigned needed = 0, arrived = 0, phase = 0;
  std::vector<Thread*> waiting;
};

struct Warp {
  Barrier barrier;
  float values[2][32];
};

struct Launch;

struct Block {
  Launch* launch;
  unsigned index, rank_in_cluster;
  struct Cluster* cluster;
  Barrier barrier;
  std::vector<Warp> warps;
  bool allowed = false;
  alignas(16) char shared[2][4096];
};

struct Cluster {
  Barrier barrier;
  std::vector<Block*> blocks;
};

struct Copy {
  void* to;
  const void* from;
  size_t bytes;
};

struct Launch {
  void (*kernel)(const void* params);
  std::vector<char> params;
  unsigned clusters, cluster, threads, rank;
  std::vector<Copy> inputs;
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<std::unique_ptr<Cluster>> groups;
  std::vector<std::unique_ptr<Thread>> fibers;
  std::vector<Thread*> waiting;  // for the launch before to end
  std::vector<std::pair<uint32_t*, uint32_t>> lingering;  // stores seen when it has ended
  unsigned running = 0, allowing = 0;
  bool started = false, predecessor_ended = false;
};

struct Thread {
  ucontext_t context;
  void* stack;
  Block* block;
  unsigned index, cluster_phase = 0;
  unsigned shuffle = 0;
};

struct Word {
  uint32_t* at;
  uint32_t value;
  Launch* launch;
};

struct Memory {
  const char* base;
  size_t bytes;
};

constexpr size_t kStack = 64 * 1024;

inline std::mt19937 random{1};
inline std::vector<std::deque<std::unique_ptr<Launch>>> queues;
inline std::vector<Memory> memories;  // by rank
inline std::vector<Thread*> ready;
inline std::vector<Word> pending;
inline std::vector<void*> stacks;
inline Thread* current = nullptr;
inline ucontext_t scheduler;
inline uint64_t steps = 0;
inline unsigned asleep = ~0u;  // a rank
inline std::vector<Copy> next_inputs;

inline bool chance(unsigned percent) { return random() % 100 < percent; }
inline void park() { swapcontext(&current->context, &scheduler); }
inline void yield() {
  ready.push_back(current);
  park();
}
inline void maybe_yield(unsigned percent) {
  if (chance(percent)) yield();
}

inline unsigned arrive(Barrier& barrier) {
  const unsigned before = barrier.phase;
  if (++barrier.arrived == barrier.needed) {
    barrier.arrived = 0;
    ++barrier.phase;
    ready.insert(ready.end(), barrier.waiting.begin(), barrier.waiting.end());
    barrier.waiting.clear();
  }
  return before;
}
inline void wait(Barrier& barrier, unsigned before) {
  while (barrier.phase == before) {
    barrier.waiting.push_back(current);
    park();
  }
}

inline void apply(size_t i) {
  *pending[i].at = pending[i].value;
  pending[i] = pending.back();
  pending.pop_back();
}

void start_next(unsigned rank);

inline void run_fiber() {
  Launch* launch = current->block->launch;
  launch->kernel(launch->params.data());
  if (--launch->running == 0) {
    for (size_t i = pending.size(); i-- > 0;)
      if (pending[i].launch == launch) apply(i);
    for (const auto& [at, value] : launch->lingering) *at = value;
    launch->lingering.clear();
  }
  park();
}

inline void start(Launch& launch) {
  launch.started = true;
  for (unsigned g = 0; g < launch.clusters; ++g) {
    launch.groups.push_back(std::make_unique<Cluster>());
    Cluster& group = *launch.groups.back();
    group.barrier.needed = launch.cluster * launch.threads;
    for (unsigned b = 0; b < launch.cluster; ++b) {
      launch.blocks.push_back(std::make_unique<Block>());
      Block& block = *launch.blocks.back();
      block.launch = &launch;
      block.index = g * launch.cluster + b;
      block.rank_in_cluster = b;
      block.cluster = &group;
      block.barrier.needed = launch.threads;
      block.warps.resize(launch.threads / 32);
      for (Warp& warp : block.warps) warp.barrier.needed = 32;
      std::memset(block.shared, 0xff, sizeof block.shared);  // NaN
      group.blocks.push_back(&block);
      for (unsigned t = 0; t < launch.threads; ++t) {
        auto thread = std::make_unique<Thread>();
        if (stacks.empty()) {
          void* made = mmap(nullptr, kStack, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
          if (made == MAP_FAILED) std::abort();
          stacks.push_back(made);
        }
        thread->stack = stacks.back();
        stacks.pop_back();
        thread->block = &block;
        thread->index = t;
        getcontext(&thread->context);
        thread->context.uc_stack.ss_sp = thread->stack;
        thread->context.uc_stack.ss_size = kStack;
        thread->context.uc_link = nullptr;
        makecontext(&thread->context, run_fiber, 0);
        ready.push_back(thread.get());
        launch.fibers.push_back(std::move(thread));
        ++launch.running;
      }
    }
  }
}

// The launch ahead has ended: write the inputs and let the fibers go on.
inline void release(Launch& launch) {
  launch.predecessor_ended = true;
  for (const Copy& copy : launch.inputs) std::memcpy(copy.to, copy.from, copy.bytes);
  ready.insert(ready.end(), launch.waiting.begin(), launch.waiting.end());
  launch.waiting.clear();
}

// Start what may start, end what has ended; false when everything is done.
inline bool advance() {
  bool any = false;
  for (auto& queue : queues) {
    while (!queue.empty() && queue.front()->started && queue.front()->running == 0) {
      for (auto& fiber : queue.front()->fibers) stacks.push_back(fiber->stack);
      queue.pop_front();
      if (!queue.empty() && queue.front()->started) release(*queue.front());
    }
    if (queue.empty()) continue;
    any = true;
    if (!queue.front()->started) {
      start(*queue.front());
      release(*queue.front());
    }
    if (queue.size() > 1 && !queue[1]->started &&
        queue[0]->allowing == queue[0]->blocks.size() && chance(50))
      start(*queue[1]);
  }
  return any;
}

// Runs all launches. 0: done; 1: fibers wait for what never comes; 2: too many steps.
inline int run(uint64_t most_steps) {
  const uint64_t last = steps + most_steps;
  uint64_t until = 0;
  while (advance()) {
    if (steps >= until) {  // now and then one rank hardly gets on
      asleep = chance(60) ? random() % queues.size() : ~0u;
      until = steps + random() % (chance(30) ? 300000 : 20000);
    }
    for (int i = 0; i < 256; ++i) {
      if (steps++ > last) return 2;
      if (!pending.empty() && (ready.empty() || chance(60)))
        for (size_t n = 1 + pending.size() / 32; n-- > 0 && !pending.empty();) {
          const size_t at = random() % pending.size();
          if (pending[at].launch->rank != asleep || ready.empty()) apply(at);
        }
      if (ready.empty()) break;
      size_t i_next = random() % ready.size();
      for (int tries = 8; tries > 0 && ready[i_next]->block->launch->rank == asleep; --tries)
        i_next = random() % ready.size();
      current = ready[i_next];
      ready[i_next] = ready.back();
      ready.pop_back();
      swapcontext(&scheduler, &current->context);
    }
    if (ready.empty() && pending.empty()) {
      bool ended = false;
      for (auto& queue : queues) ended |= !queue.empty() && queue.front()->running == 0;
      if (!ended) return 1;
    }
  }
  return 0;
}

}  // namespace emulator

// ---- what the kernel's source asks for ----------------------------------------------------

#define DEVICE static inline
#define KERNEL static
#define BOUNDS(threads, blocks)
#define SHARED(type, name, count) \
  type(*name)[count] = reinterpret_cast<type(*)[count]>(emulator::current->block->shared)

DEVICE u32 thread_index() { return emulator::current->index; }
DEVICE u32 block_index() { return emulator::current->block->index; }
DEVICE u32 cluster_rank() { return emulator::current->block->rank_in_cluster; }

template <typename T>
DEVICE T load(const T* p) {
  emulator::maybe_yield(3);
  return *p;
}
DEVICE Words poll(const Words* p) {
  emulator::maybe_yield(40);
  return *p;
}
DEVICE u32 poll_word(const u32* p) {
  emulator::maybe_yield(20);
  return *p;
}
DEVICE void push_word(u32* p, u32 v) {
  emulator::Launch* launch = emulator::current->block->launch;
  const emulator::Memory& own = emulator::memories[launch->rank];
  const char* at = reinterpret_cast<char*>(p);
  // Nobody waits for a store to the rank's own memory, so it may take until the end.
  if (at >= own.base && at < own.base + own.bytes && emulator::chance(3))
    launch->lingering.emplace_back(p, v);
  else
    emulator::pending.push_back({p, v, launch});
}
DEVICE void push(Words* p, Words v) {
  for (int k = 0; k < 4; ++k) push_word(&p->w[k], v.w[k]);
  emulator::maybe_yield(10);
}
DEVICE u32 exchange(u32* p, u32 v) {
  const u32 old = *p;
  *p = v;
  return old;
}
DEVICE void fence_system() {}
DEVICE u64 nanoseconds() { return emulator::steps; }
DEVICE void wait_for_predecessor() {
  emulator::Launch* launch = emulator::current->block->launch;
  while (!launch->predecessor_ended) {
    launch->waiting.push_back(emulator::current);
    emulator::park();
  }
}
DEVICE void let_successor_start() {
  emulator::Block* block = emulator::current->block;
  block->launch->allowing += !block->allowed;
  block->allowed = true;
}
DEVICE void cluster_arrive_relaxed() {
  emulator::current->cluster_phase = emulator::arrive(emulator::current->block->cluster->barrier);
}
DEVICE void cluster_wait() {
  emulator::wait(emulator::current->block->cluster->barrier, emulator::current->cluster_phase);
}
DEVICE void cluster_meet() {
  cluster_arrive_relaxed();
  cluster_wait();
}
DEVICE void store_in_cluster(float* p, u32 number, float v) {
  emulator::Block* own = emulator::current->block;
  const size_t offset = reinterpret_cast<char*>(p) - &own->shared[0][0];
  std::memcpy(&own->cluster->blocks[number]->shared[0][0] + offset, &v, 4);
}
DEVICE void block_meet() {
  emulator::Barrier& barrier = emulator::current->block->barrier;
  emulator::wait(barrier, emulator::arrive(barrier));
}
DEVICE float shuffle_xor(float v, u32 mask) {
  emulator::Thread* thread = emulator::current;
  emulator::Warp& warp = thread->block->warps[thread->index / 32];
  const unsigned turn = thread->shuffle++ & 1;
  warp.values[turn][thread->index % 32] = v;
  emulator::wait(warp.barrier, emulator::arrive(warp.barrier));
  return warp.values[turn][(thread->index % 32) ^ mask];
}

#include "host_numbers.h"
