// A digest of the kernel's outputs over the forms and sizes of rows, for one instruction set.
//
// Built for several sets of one machine, the digests must be the same.
#include "cpu_all_reduce_add_rms_norm.cpp"

#include <cstdio>
#include <random>

using namespace fx_fusion;

static uint64_t digest = 14695981039346656037ULL;

static void add_to_digest(const void* data, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i)
    digest = (digest ^ static_cast<const unsigned char*>(data)[i]) * 1099511628211ULL;
}

// Values of all sizes, zeros of both signs and denormals among them; no NaN, no infinity.
template <typename T>
static std::vector<T> random_values(std::mt19937& draws, int64_t count) {
  std::vector<T> values(count);
  for (auto& value : values) {
    const float unit = static_cast<float>(draws() % 20001) / 10000.0f - 1.0f;
    const float scales[] = {1.0f, 1e-3f, 100.0f, 1e-40f};
    value = T(unit * scales[draws() % 4]);
  }
  return values;
}

template <typename T>
static void run_form(const Form& form, int64_t hidden, uint32_t seed) {
  std::mt19937 draws(seed);
  const auto x = random_values<T>(draws, 3 * hidden), y = random_values<T>(draws, 3 * hidden),
             residual = random_values<T>(draws, 3 * hidden),
             weight = random_values<T>(draws, hidden), bias = random_values<T>(draws, hidden);
  std::vector<T> norm(3 * hidden), out(3 * hidden), reduced(3 * hidden);
  std::vector<float> rstd(3), scratch((hidden + kLanes - 1) / kLanes * kLanes);
  Call call{};
  call.x = x.data();
  call.residual = residual.data();
  call.weight = weight.data();
  call.bias = bias.data();
  call.norm = norm.data();
  call.residual_out = out.data();
  call.reduced = reduced.data();
  call.rstd = rstd.data();
  call.tokens = 3;
  call.hidden = hidden;
  call.eps = 1e-6f;
  call.scale = 0.22f;
  call.form = form;
  for (int64_t row = 0; row < 3; ++row) {
    const void* parts[2] = {x.data() + row * hidden, y.data() + row * hidden};
    row_function(form)(call, parts, 2, row, scratch.data());
  }
  add_to_digest(norm.data(), norm.size() * sizeof(T));
  add_to_digest(out.data(), out.size() * sizeof(T));
  add_to_digest(reduced.data(), reduced.size() * sizeof(T));
  add_to_digest(rstd.data(), rstd.size() * sizeof(float));
}

int main() {
  for (int64_t hidden : {1, 7, 63, 64, 65, 100, 2880}) {
    for (int32_t dtype : {kFloat32, kFloat16, kBFloat16}) {
      for (int32_t norm_dtype : {static_cast<int32_t>(kFloat32), dtype}) {
        for (int variant = 0; variant < 5; ++variant) {
          Form form = usual_form(dtype, norm_dtype);
          if (variant == 1) form.has_bias = 1, form.bias_dtype = dtype;
          if (variant == 2) form.has_scale = 1;
          if (variant == 3) form.weight_form = kOnePlusWeight;
          if (variant == 4) form.reciprocal = kSqrt;
          const uint32_t seed = static_cast<uint32_t>(hidden * 31 + variant);
          if (dtype == kFloat32) run_form<float>(form, hidden, seed);
          if (dtype == kFloat16) run_form<at::Half>(form, hidden, seed);
          if (dtype == kBFloat16) run_form<at::BFloat16>(form, hidden, seed);
        }
      }
    }
  }
  std::printf("%016llx %d\n", static_cast<unsigned long long>(digest), Vec::size());
  return 0;
}
