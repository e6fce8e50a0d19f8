// What a kernel is told: options when it is compiled, parameters when it is launched; and what a
// workspace holds. The same for all kernels, so that one launcher serves them.
//
// No guard against a second reading: it depends on the options, and a test reads it once for
// each set of them, into a namespace of its own.

// Options, all compile-time. Dtypes as in `Dtype`; -1 where an input is absent.
//   WORLD CLUSTER THREADS BLOCKS VECTORS_PER_THREAD ALIGNED
//   X_DTYPE RESIDUAL_DTYPE BIAS_DTYPE WEIGHT_DTYPE  CAST_DTYPE BIAS_OUT_DTYPE HIDDEN_DTYPE
//   NORM_DTYPE PRODUCT_DTYPE OUT_DTYPE  ONE_PLUS_WEIGHT DIVIDE_BY_ROOT HAS_SCALE
//   WANT_NORM WANT_RESIDUAL WANT_REDUCED WANT_RSTD

constexpr int kWorld = WORLD;  // 1 where nothing is exchanged
constexpr int kVectors = VECTORS_PER_THREAD;
constexpr int kElements = X_DTYPE == kFloat32 ? 4 : 8;  // of x in 16 bytes
constexpr int kSegment = 512;                           // vectors
constexpr int kMaxLeaves = 128;
// Sources polled at once: more of them take more registers than a thread has.
constexpr int kGroup = kVectors >= 4 ? 2 : kWorld <= 8 ? kWorld : 4;  // sources polled at once

enum Cause : u32 { kPeerTimeout = 1, kOverlap = 2 };

struct alignas(16) State {
  u32 slot;  // of the next use
  u32 busy;  // a launch is at work on it
  u32 unused[2];
};

struct Params {
  // of the call
  const void* x;
  const void* residual;
  const void* weight;
  const void* bias;
  const float* eps_pointer;    // or null
  const float* scale_pointer;  // or null
  void* norm;
  void* residual_out;
  void* reduced;
  float* rstd;
  int rows;
  u32 clusters;  // in the grid
  float eps;
  float scale;
  // of the hidden size
  int hidden;
  int vectors;       // ceil(hidden / kElements)
  int row_segments;  // ceil(vectors / kSegment)
  float inverse_hidden;
  // of the workspace
  int rank;
  u32 segments;
  u64 timeout;  // nanoseconds
  State* state;
  u32* control;  // [0]: the cause, once something failed
  u32* host;     // mapped host memory: [0] the cause, [1 + r] rank r was waited for in vain
  char* buffers[16];
};
