// The GPU kernels among threads as ranks.
//
//   threads_main WORLD CALLS SEED MUTANT
//
// Every call has an algorithm, tokens, hidden size, dtype and inputs of its own; all its outputs are
// compared, bit for bit, with a reference. Prints "ok" and exits 0 if all are right.
// `variants.inc` includes the kernels, in namespaces of their own, and defines `kVariants`.
#define FX_FUSION_EMULATED
#include "gpu_device.h"

#include <barrier>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>

struct Variant {
  void (*kernel)(const void* params);
  bool two_shot;
  int world, cluster, threads, vectors, aligned, dtype;
};
#include "variants.inc"
using v0::Params;
using v0::State;

constexpr int kClusters = 2;      // of a rank at once
constexpr int kSegments = 3;      // of one-shot's region, few, so that calls take several launches
constexpr int kOwnerSegments = 1; // of two-shot's, for each owner
constexpr unsigned kMostThreads = 64, kMostBlocks = 2;
constexpr size_t kSegmentWords = 2048;
constexpr float kEps = 1e-6f;

static float widen(int dtype, const char* p, size_t i) {
  if (dtype == kFloat32) return reinterpret_cast<const float*>(p)[i];
  const u32 v = reinterpret_cast<const u16*>(p)[i];
  return dtype == kFloat16 ? low_of<kFloat16>(v) : low_of<kBFloat16>(v);
}
static void put(int dtype, char* p, size_t i, float v) {
  if (dtype == kFloat32) reinterpret_cast<float*>(p)[i] = v;
  else
    reinterpret_cast<u16*>(p)[i] =
        static_cast<u16>(dtype == kFloat16 ? pack<kFloat16>(v, 0) : pack<kBFloat16>(v, 0));
}
static float rounded(int dtype, float v) {
  char word[4];
  put(dtype, word, 0, v);
  return widen(dtype, word, 0);
}

using Array = std::vector<char>;

struct Call {
  const Variant* variant;
  int rows, hidden, width;
  std::vector<Array> x, residual, norm, hidden_out, reduced;  // by rank
  Array weight;
};

struct Rank {
  std::vector<u32> one_shot, two_shot;
  std::vector<State> one_shot_states, two_shot_states;
  u32 control = 0, host[17] = {};
};

static Array random_array(int dtype, size_t count, std::mt19937& random) {
  Array made(count * (dtype == kFloat32 ? 4 : 2) + 16);
  for (size_t i = 0; i < count; ++i) {
    const u32 kind = random() % 20;
    const float v = (static_cast<int>(random() % 4001) - 2000) / 1000.0f;
    put(dtype, made.data(), i, kind == 0 ? -0.0f : kind == 1 ? 0.0f : v);
  }
  return made;
}

static Call draw(int world, std::mt19937& random) {
  std::vector<const Variant*> fitting;
  for (const Variant& variant : kVariants)
    if (variant.world == world) fitting.push_back(&variant);
  Call call;
  call.variant = fitting[random() % fitting.size()];
  const int dtype = call.variant->dtype, elements = dtype == kFloat32 ? 4 : 8;
  const int most = call.variant->cluster * call.variant->threads * call.variant->vectors;
  call.hidden = (1 + random() % most) * elements;
  if (!call.variant->aligned) call.hidden -= 1 + random() % (elements - 1);
  call.width = dtype == kFloat32 ? 4 : 2;
  call.rows = 1 + random() % 5;
  const size_t count = static_cast<size_t>(call.rows) * call.hidden;
  for (int rank = 0; rank < world; ++rank) {
    call.x.push_back(random_array(dtype, count, random));
    call.residual.push_back(random_array(dtype, count, random));
    for (auto* out : {&call.norm, &call.hidden_out, &call.reduced})
      out->push_back(Array(count * call.width, 0x55));
  }
  call.weight = random_array(dtype, call.hidden, random);
  return call;
}

// What a launch of rows [first, first + rows) is told.
static Params params_of(const Call& call, std::vector<Rank>& ranks, int rank, int first, int rows) {
  const Variant& variant = *call.variant;
  const size_t from = static_cast<size_t>(first) * call.hidden * call.width;
  const auto at = [from](const Array& array) { return const_cast<char*>(array.data()) + from; };
  Params p{};
  p.x = at(call.x[rank]);
  p.residual = at(call.residual[rank]);
  p.weight = call.weight.data();
  p.norm = at(call.norm[rank]);
  p.residual_out = at(call.hidden_out[rank]);
  p.reduced = at(call.reduced[rank]);
  p.rows = rows;
  p.clusters = rows < kClusters ? rows : kClusters;
  p.eps = kEps;
  p.scale = 1.0f;
  p.hidden = call.hidden;
  const int elements = 16 / call.width;
  p.vectors = (call.hidden + elements - 1) / elements;
  p.row_segments = (p.vectors + 511) / 512;
  p.inverse_hidden = static_cast<float>(1.0 / call.hidden);
  p.rank = rank;
  p.segments = variant.two_shot ? kOwnerSegments : kSegments;
  p.timeout = threads::mutant ? 1'000'000'000ull : 60'000'000'000ull;
  p.state = (variant.two_shot ? ranks[rank].two_shot_states : ranks[rank].one_shot_states).data();
  p.control = &ranks[rank].control;
  p.host = ranks[rank].host;
  for (size_t r = 0; r < ranks.size(); ++r)
    p.buffers[r] =
        reinterpret_cast<char*>((variant.two_shot ? ranks[r].two_shot : ranks[r].one_shot).data());
  return p;
}

static void run_cluster(std::vector<Call>& calls, std::vector<Rank>& ranks, int rank, int number,
                        std::barrier<>& launch_ends, unsigned seed) {
  threads::Cluster cluster;
  threads::prepare(cluster, kMostBlocks, kMostThreads, seed);
  for (const Call& call : calls) {
    const Variant& variant = *call.variant;
    const int most = variant.two_shot ? kOwnerSegments * variant.world : kSegments;
    for (int first = 0; first < call.rows; first += most) {
      const int rows = std::min(most, call.rows - first);
      const Params params = params_of(call, ranks, rank, first, rows);
      if (number < static_cast<int>(params.clusters))
        threads::run(cluster, number, variant.cluster, variant.threads, variant.kernel, &params);
      launch_ends.arrive_and_wait();
    }
  }
  threads::release(cluster);
}

static void add_pairwise(float (&v)[32]) {
  for (int mask = 16; mask > 0; mask /= 2) {
    float before[32];
    std::memcpy(before, v, sizeof v);
    for (int lane = 0; lane < 32; ++lane) v[lane] = before[lane] + before[lane ^ mask];
  }
}

// The names of the outputs of a row that aren't what they should be.
static std::string wrong_in_row(const Call& call, int rank, int row) {
  const int dtype = call.variant->dtype, elements = 16 / call.width;
  const size_t start = static_cast<size_t>(row) * call.hidden;
  std::vector<float> sums(call.hidden), hidden(call.hidden);
  for (int i = 0; i < call.hidden; ++i) {
    float sum = 0.0f;
    for (const Array& x : call.x) sum = sum + widen(dtype, x.data(), start + i);
    sums[i] = rounded(dtype, sum);
    hidden[i] = rounded(dtype, widen(dtype, call.residual[rank].data(), start + i) + sums[i]);
  }
  float lanes[32] = {};
  for (int leaf = 0; leaf * 32 * elements < call.hidden; ++leaf) {
    float vectors[32] = {};
    for (int i = leaf * 32 * elements; i < (leaf + 1) * 32 * elements && i < call.hidden; ++i) {
      float& vector = vectors[i / elements % 32];
      vector = vector + hidden[i] * hidden[i];
    }
    add_pairwise(vectors);
    lanes[leaf % 32] = lanes[leaf % 32] + vectors[0];
  }
  add_pairwise(lanes);
  const float mean = lanes[0] * static_cast<float>(1.0 / call.hidden);
  const float rstd = reciprocal_root(mean + kEps);
  std::string wrong;
  const auto compare = [&](const char* name, const Array& given, int i, float v) {
    char expected[4];
    put(dtype, expected, 0, v);
    if (std::memcmp(expected, given.data() + (start + i) * call.width, call.width) == 0) return;
    if (wrong.find(name) == std::string::npos) wrong += name;
  };
  for (int i = 0; i < call.hidden; ++i) {
    compare(" reduced", call.reduced[rank], i, sums[i]);
    compare(" hidden", call.hidden_out[rank], i, hidden[i]);
    const float n = rounded(dtype, hidden[i] * rstd);
    compare(" norm", call.norm[rank], i, n * widen(dtype, call.weight.data(), i));
  }
  return wrong;
}

int main(int argc, char** argv) {
  if (argc != 5) return 64;
  const int world = std::atoi(argv[1]), count = std::atoi(argv[2]), seed = std::atoi(argv[3]);
  threads::mutant = std::atoi(argv[4]);
  std::mt19937 random(seed);
  std::vector<Call> calls;
  for (int i = 0; i < count; ++i) calls.push_back(draw(world, random));
  std::vector<Rank> ranks(world);
  for (Rank& rank : ranks) {
    const size_t peers = world - 1;
    rank.one_shot.assign(2 * peers * kSegments * kSegmentWords, 0xffffffffu);
    rank.two_shot.assign(3 * peers * kOwnerSegments * kSegmentWords, 0xffffffffu);
    rank.one_shot_states.resize(kSegments);
    rank.two_shot_states.resize(kOwnerSegments * world);
  }
  std::vector<std::unique_ptr<std::barrier<>>> ends;
  std::vector<std::thread> running;
  for (int rank = 0; rank < world; ++rank) {
    ends.push_back(std::make_unique<std::barrier<>>(kClusters));
    for (int number = 0; number < kClusters; ++number)
      running.emplace_back([&, rank, number, &end = *ends.back()] {
        run_cluster(calls, ranks, rank, number, end, seed + 100 * rank + number);
      });
  }
  for (std::thread& thread : running) thread.join();
  int failed = 0;
  for (int rank = 0; rank < world; ++rank) {
    if (ranks[rank].control != 0 || ranks[rank].host[0] != 0) {
      std::fprintf(stderr, "rank %d: a wait or an overlap failed\n", rank);
      failed = 1;
    }
    for (int i = 0; i < count; ++i)
      for (int row = 0; row < calls[i].rows; ++row) {
        const std::string wrong = wrong_in_row(calls[i], rank, row);
        if (wrong.empty()) continue;
        if (failed++ < 8)
          std::fprintf(stderr, "wrong in call %d, rank %d, row %d:%s\n", i, rank, row,
                       wrong.c_str());
      }
  }
  if (failed) return 1;
  std::puts("ok");
  return 0;
}
