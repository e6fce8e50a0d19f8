// The calls of the CUDA driver that the launch code makes, without a GPU: launches are written down.
#include <stdint.h>
#include <string.h>

typedef struct {
  unsigned grid[3], block[3], shared_bytes;
  void* stream;
  unsigned* attributes;
  unsigned attribute_count;
} Config;

typedef struct {
  uint64_t function, stream, cluster, grid, threads;
  unsigned char parameters[512];
} Record;

enum { kMost = 256 };
static Record records[kMost];
static int made, limit = kMost, failing;
static uint64_t loaded = 100;

int cuLaunchKernelEx(const Config* config, void* function, void** parameters, void** extra) {
  if (failing && made >= limit) return failing;
  Record* record = &records[made++ % kMost];
  record->function = (uint64_t)function;
  record->stream = (uint64_t)config->stream;
  record->grid = config->grid[0];
  record->threads = config->block[0];
  record->cluster = 1;
  for (unsigned i = 0; i < config->attribute_count; ++i)
    if (config->attributes[i * 18] == 4) record->cluster = config->attributes[i * 18 + 2];
  memcpy(record->parameters, parameters[0], 96 + 16 + 40 + 128);
  return 0;
}

int stub_made(void) { return made; }
const Record* stub_record(int index) { return &records[index]; }
void stub_reset(int launches_that_work, int status) {
  made = 0;
  limit = launches_that_work;
  failing = status;
}

int cuModuleLoadData(void** module, const void* code) { return *module = (void*)++loaded, 0; }
int cuModuleGetFunction(void** function, void* module, const char* name) {
  return *function = module, 0;
}
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* count, void* function, int threads, size_t bytes) {
  return *count = 2, 0;
}
int cuOccupancyMaxActiveClusters(int* count, void* function, const Config* config) {
  return *count = 40, 0;
}
int cuThreadExchangeStreamCaptureMode(int* mode) { return 0; }
int cuStreamIsCapturing(void* stream, int* status) { return *status = 0, 0; }
int cuCtxGetCurrent(void** context) { return *context = (void*)7, 0; }
int cuCtxSetCurrent(void* context) { return 0; }
int cuGetErrorString(int status, const char** text) { return *text = "stub", 0; }
