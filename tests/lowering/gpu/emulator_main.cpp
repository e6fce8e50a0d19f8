// The emulator as a shared library. `variants.inc` includes the kernel once for each variant, in
// namespaces of their own, and defines `kernels`, the table of them.
#define FX_FUSION_EMULATED
#include "gpu_device.h"
#include "variants.inc"

using emulator::queues;

extern "C" void emulator_reset(uint32_t seed, uint32_t ranks) {
  emulator::random.seed(seed);
  emulator::ready.clear();
  emulator::pending.clear();
  emulator::next_inputs.clear();
  queues.clear();
  queues.resize(ranks);
  emulator::memories.assign(ranks, {nullptr, 0});
}

// A rank's workspace.
extern "C" void emulator_memory(uint32_t rank, const char* base, size_t bytes) {
  emulator::memories[rank] = {base, bytes};
}

// An input of the next launch, written when the launch ahead of it has ended.
extern "C" void emulator_input(void* to, const void* from, size_t bytes) {
  emulator::next_inputs.push_back({to, from, bytes});
}

extern "C" void emulator_launch(uint32_t rank, uint32_t variant, const char* params,
                                size_t bytes, uint32_t clusters, uint32_t cluster,
                                uint32_t threads) {
  auto launch = std::make_unique<emulator::Launch>();
  launch->kernel = kernels[variant];
  launch->params.assign(params, params + bytes);
  launch->clusters = clusters;
  launch->cluster = cluster;
  launch->threads = threads;
  launch->rank = rank;
  launch->inputs.swap(emulator::next_inputs);
  queues[rank].push_back(std::move(launch));
}

extern "C" int emulator_run(uint64_t most_steps) { return emulator::run(most_steps); }
