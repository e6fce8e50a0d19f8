// What the kernels that wait for peers share: how data is its own flag, how long a wait lasts, and
// how it is said to have been in vain. (No guard, as gpu_params.h says.)
//
// A receive place holds the word 0xffffffff wherever nothing has arrived; a sender turns such a
// word, a NaN, into another NaN. A reader polls until none of a vector's words is that mark: words
// of 32 bits arrive whole. So the places serve 16- and 32-bit elements alike.

constexpr u32 kSpinsPerLook = 64;  // polls between two looks at the clock

// What marks a place where nothing has arrived and, with a bit for each missing rank, one where
// nothing will. Both are NaNs in every dtype.
constexpr u32 kNothing = 0xffffffffu;
constexpr u32 kFailed = 0xfffe0000u;

DEVICE bool has_nothing(const Words& v) {
  bool found = false;
#pragma unroll
  for (int k = 0; k < 4; ++k) found |= v.w[k] == kNothing;
  return found;
}

// NaNs that look like a mark become others.
DEVICE Words without_marks(Words v) {
#pragma unroll
  for (int k = 0; k < 4; ++k)
    if (v.w[k] >= kFailed) v.w[k] &= 0x7fffffffu;
  return v;
}

DEVICE Words all_words(u32 word) { return Words{{word, word, word, word}}; }

DEVICE void report(const Params& p, Cause cause) {
  push_word(p.control, cause);
  fence_system();
  push_word(p.host, cause);
}

enum Look { kGoOn, kGiveUp, kLate };

// One wait.
struct Patience {
  u32 spins = 0;
  u64 start = 0;
};

// To be asked after every poll that found something missing: kLate once `limit` nanoseconds have
// gone by, kGiveUp if another wait has failed.
DEVICE Look look(const Params& p, Patience& patience, u64 limit) {
  if (++patience.spins % kSpinsPerLook != 0) return kGoOn;
  const u64 now = nanoseconds();
  if (patience.start == 0) patience.start = now;
  if (now - patience.start > limit) return kLate;
  return poll_word(p.control) == 0 ? kGoOn : kGiveUp;
}
