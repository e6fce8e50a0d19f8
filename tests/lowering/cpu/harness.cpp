// The CPU kernel among threads as ranks, for ThreadSanitizer, or processes, for AddressSanitizer.
//
//   harness RANKS CALLS SEED threads|processes
//
// Every call has sizes, dtype, algorithm and inputs of its own; each output is compared with sums
// of small integers, which are exact. Prints "ok" and exits 0 if all are right.
#include "cpu_all_reduce_add_rms_norm.cpp"

#include <sys/mman.h>
#include <sys/wait.h>

#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>

using namespace fx_fusion;

static float value(int call, int rank, int64_t index) {
  return static_cast<float>((index * 7 + call * 3 + rank * 11) % 17);
}

struct Draw {
  int call;
  int64_t tokens;
  int64_t hidden;
  bool two_shot;
};

// One call with buffers of exactly its size, so that a stray read or write is seen.
template <typename T>
static int run_call(Workspace& space, const Form& form, const Draw& draw) {
  const int64_t count = draw.tokens * draw.hidden;
  std::vector<T> x(count), residual(count, T(2.0f)), weight(draw.hidden, T(1.0f));
  std::vector<T> norm(count), hidden(count), reduced(count, T(-1.0f));
  for (int64_t i = 0; i < count; ++i) x[i] = T(value(draw.call, space.rank, i));
  Call call{};
  call.x = x.data();
  call.residual = residual.data();
  call.weight = weight.data();
  call.norm = norm.data();
  call.residual_out = hidden.data();
  call.reduced = reduced.data();
  call.tokens = draw.tokens;
  call.hidden = draw.hidden;
  call.eps = 1e-6f;
  call.scale = 1.0f;
  call.form = form;
  call.threads = 1;
  call.two_shot = draw.two_shot;
  if (fx_fusion_cpu_run(&space, &call) != kOk) return 2;
  for (int64_t i = 0; i < count; ++i) {
    float expected = 0;
    for (int rank = 0; rank < space.world_size; ++rank) expected += value(draw.call, rank, i);
    const float given = static_cast<float>(reduced[i]);
    if (given != expected || static_cast<float>(hidden[i]) != expected + 2.0f) {
      std::fprintf(stderr, "call %d, rank %d: wrong sum\n", draw.call, space.rank);
      return 1;
    }
  }
  return 0;
}

static int run_rank(char* memory, int64_t slot_bytes, int rank, int ranks, int calls, int seed) {
  Workspace space{memory, slot_bytes, rank, ranks, -1, 0, 0, 60'000'000'000LL, 0};
  std::mt19937 shared(seed);         // the same draws on all ranks
  std::mt19937 own(seed + 1 + rank); // this rank's delays
  for (int call = 0; call < calls; ++call) {
    const Draw draw{
        call, 1 + static_cast<int64_t>(shared() % 9), 1 + static_cast<int64_t>(shared() % 150),
        shared() % 2 == 0};
    const int dtype = shared() % 3;
    if (own() % 50 == 0) std::this_thread::sleep_for(std::chrono::microseconds(own() % 300));
    const Form form = usual_form(dtype, kFloat32);
    const int status = dtype == kFloat32 ? run_call<float>(space, form, draw)
        : dtype == kFloat16              ? run_call<at::Half>(space, form, draw)
                                         : run_call<at::BFloat16>(space, form, draw);
    if (status) {  // the others need not wait for it
      space.header().ranks[rank].gave_up.store(1, std::memory_order_release);
      return status;
    }
  }
  return 0;
}

int main(int argc, char** argv) {
  if (argc != 5) return 64;
  const int ranks = std::atoi(argv[1]), calls = std::atoi(argv[2]), seed = std::atoi(argv[3]);
  const bool processes = std::string(argv[4]) == "processes";
  const int64_t slot_bytes = 2048; // small, so that most calls take several chunks
  const int64_t bytes = (fx_fusion_cpu_memory_bytes(ranks, slot_bytes) + 4095) / 4096 * 4096;
  // a page behind the memory that nobody may touch
  void* mapped =
      mmap(nullptr, bytes + 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return 65;
  char* memory = static_cast<char*>(mapped);
  if (mprotect(memory + bytes, 4096, PROT_NONE) != 0) return 66;
  std::vector<int> status(ranks);
  if (processes) {
    std::vector<pid_t> children;
    for (int rank = 0; rank < ranks; ++rank) {
      const pid_t child = fork();
      if (child == 0) std::exit(run_rank(memory, slot_bytes, rank, ranks, calls, seed));
      children.push_back(child);
    }
    for (int rank = 0; rank < ranks; ++rank) {
      waitpid(children[rank], &status[rank], 0);
      status[rank] = WIFEXITED(status[rank]) ? WEXITSTATUS(status[rank]) : 67;
    }
  } else {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < ranks; ++rank)
      threads.emplace_back([&, rank] {
        status[rank] = run_rank(memory, slot_bytes, rank, ranks, calls, seed);
      });
    for (auto& thread : threads) thread.join();
  }
  for (int code : status)
    if (code) return code;
  std::puts("ok");
  return 0;
}
