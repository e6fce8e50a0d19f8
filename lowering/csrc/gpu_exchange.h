// What the kernels that wait for peers share: how long they wait, and how they say that it was in
// vain. (No guard, as gpu_params.h says.)

constexpr u32 kSpinsPerLook = 64;  // polls between two looks at the clock

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
