// The CPU kernel with threads as ranks, for ThreadSanitizer and AddressSanitizer.
//
//   harness RANKS CALLS SEED
//
// Every call has sizes, algorithm and inputs of its own; each output is compared with sums of
// small integers, which are exact. Prints "ok" and exits 0 if all are right.
#include "cpu_all_reduce_add_rms_norm.cpp"

#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>

using namespace fx_fusion;

static float value(int call, int rank, int64_t index) {
  return static_cast<float>((index * 7 + call * 3 + rank * 11) % 17);
}

static int run_rank(char* memory, int64_t slot_bytes, int rank, int ranks, int calls, int seed) {
  Workspace space{memory, slot_bytes, rank, ranks, -1, 0, 0, 60'000'000'000LL, 0};
  std::mt19937 shared(seed);         // the same draws on all ranks
  std::mt19937 own(seed + 1 + rank); // this rank's delays
  for (int call_index = 0; call_index < calls; ++call_index) {
    const int64_t tokens = 1 + shared() % 9;
    const int64_t hidden = 1 + shared() % 150;
    const bool two_shot = shared() % 2;
    std::vector<float> x(tokens * hidden), norm(x.size()), reduced(x.size(), -1.0f);
    for (size_t i = 0; i < x.size(); ++i) x[i] = value(call_index, rank, i);
    Call call{};
    call.x = x.data();
    call.norm = norm.data();
    call.reduced = reduced.data();
    call.tokens = tokens;
    call.hidden = hidden;
    call.eps = 1e-6f;
    call.scale = 1.0f;
    call.threads = 1;
    call.two_shot = two_shot;
    if (own() % 50 == 0) std::this_thread::sleep_for(std::chrono::microseconds(own() % 300));
    if (fx_fusion_cpu_run(&space, &call) != kOk) return 2;
    for (size_t i = 0; i < x.size(); ++i) {
      float expected = 0;
      for (int other = 0; other < ranks; ++other) expected += value(call_index, other, i);
      if (reduced[i] != expected) {
        std::fprintf(stderr, "call %d, rank %d: wrong sum\n", call_index, rank);
        return 1;
      }
    }
  }
  return 0;
}

int main(int argc, char** argv) {
  if (argc != 4) return 64;
  const int ranks = std::atoi(argv[1]), calls = std::atoi(argv[2]), seed = std::atoi(argv[3]);
  const int64_t slot_bytes = 2048; // small, so that most calls take several chunks
  const int64_t bytes = fx_fusion_cpu_memory_bytes(ranks, slot_bytes);
  char* memory = static_cast<char*>(std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096));
  std::memset(memory, 0, bytes);
  std::vector<int> status(ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank)
    threads.emplace_back([&, rank] {
      status[rank] = run_rank(memory, slot_bytes, rank, ranks, calls, seed);
    });
  for (auto& thread : threads) thread.join();
  std::free(memory);
  for (int code : status)
    if (code) return code;
  std::puts("ok");
  return 0;
}
