// Flags in shared memory by which the ranks of one host wait for each other.
//
// Each rank counts up its own flag when its part of a chunk is in place (release); the others
// wait until they see the count (acquire). A wait spins a little, then yields, then sleeps on
// the flag as a futex, and ends with an error when the time is up, a peer died (each rank holds
// a file lock on its own byte of the memory while it lives), or a peer gave up.
#pragma once

#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>

namespace fx_fusion {

constexpr int kMaxRanks = 64;
constexpr int kSpins = 200;
constexpr int kYields = 100;
constexpr int64_t kSliceNanoseconds = 20'000'000; // how long a sleep may miss a death

enum Status : int32_t { kOk = 0, kTimedOut = 1, kPeerDied = 2, kPeerGaveUp = 3 };

struct alignas(128) RankState {
  std::atomic<uint32_t> flag;     // chunks this rank has put in place, modulo 2^32
  std::atomic<uint32_t> sleepers; // ranks that sleep on `flag`
  std::atomic<uint32_t> gave_up;  // set for good when this rank met an error
};

struct Header {
  RankState ranks[kMaxRanks];
};

inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

inline int64_t now_nanoseconds() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1'000'000'000LL + time.tv_nsec;
}

inline void sleep_on(std::atomic<uint32_t>& flag, uint32_t seen) {
  const timespec limit{0, kSliceNanoseconds};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&flag), FUTEX_WAIT, seen, &limit, nullptr, 0);
}

inline void publish(RankState& own, uint32_t count) {
  own.flag.store(count, std::memory_order_seq_cst);
  if (own.sleepers.load(std::memory_order_seq_cst) != 0)
    syscall(
        SYS_futex, reinterpret_cast<uint32_t*>(&own.flag), FUTEX_WAKE, INT_MAX, nullptr, nullptr,
        0);
}

// True once `flag` has reached `count`; the difference is signed, so wrapping does no harm.
inline bool reached(const RankState& peer, uint32_t count) {
  return static_cast<int32_t>(peer.flag.load(std::memory_order_acquire) - count) >= 0;
}

// True if no process holds the lock that `rank` took on its byte of the memory.
inline bool is_dead(int descriptor, int rank) {
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  return fcntl(descriptor, F_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
}

// Waits for one rank. `descriptor` < 0 turns the liveness check off (ranks as threads).
inline Status wait_for(
    Header& header, int rank, uint32_t count, int64_t deadline, int descriptor) {
  RankState& peer = header.ranks[rank];
  for (int i = 0; i < kSpins; ++i) {
    if (reached(peer, count)) return kOk;
    pause_briefly();
  }
  for (int i = 0; i < kYields; ++i) {
    if (reached(peer, count)) return kOk;
    sched_yield();
  }
  while (true) {
    peer.sleepers.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t seen = peer.flag.load(std::memory_order_seq_cst);
    if (static_cast<int32_t>(seen - count) < 0) sleep_on(peer.flag, seen);
    peer.sleepers.fetch_sub(1, std::memory_order_seq_cst);
    if (reached(peer, count)) return kOk;
    if (peer.gave_up.load(std::memory_order_acquire)) return kPeerGaveUp;
    if (descriptor >= 0 && is_dead(descriptor, rank)) {
      // it may have finished its part and left in good order
      return reached(peer, count) ? kOk : kPeerDied;
    }
    if (now_nanoseconds() > deadline) return kTimedOut;
  }
}

} // namespace fx_fusion
