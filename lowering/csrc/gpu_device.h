// What the GPU kernels need of the machine, in NVIDIA's and AMD's words (and a test's): memory operations with
// their scope, rounding, the clock, clusters, programmatic launch. No header of either is read,
// so the source compiles with NVRTC, hipRTC and plain clang.
//
// Memory that other GPUs read or write goes through push/poll alone (relaxed, system scope).
// Inputs are read through `load`, which is never the read-only cache: under programmatic launch
// the kernel before may still be writing when this one starts.
#pragma once

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

enum Dtype { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };

struct alignas(16) Words {
  u32 w[4];
};

#if defined(__HIP__)
#define DEVICE __attribute__((device, always_inline)) inline
#define KERNEL extern "C" __attribute__((global))
#define SHARED(type, name, count) __attribute__((shared)) type name[2][count]
#define BOUNDS(threads, blocks) __attribute__((amdgpu_flat_work_group_size(64, threads)))

DEVICE u32 thread_index() { return __builtin_amdgcn_workitem_id_x(); }
DEVICE u32 block_index() { return __builtin_amdgcn_workgroup_id_x(); }

template <typename T>
DEVICE T load(const T* p) { return *p; }

DEVICE Words poll(const Words* p) {
  const u64* q = reinterpret_cast<const u64*>(p);
  const u64 a = __hip_atomic_load(q, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
  const u64 b = __hip_atomic_load(q + 1, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
  return Words{u32(a), u32(a >> 32), u32(b), u32(b >> 32)};
}
DEVICE void push(Words* p, Words v) {
  u64* q = reinterpret_cast<u64*>(p);
  __hip_atomic_store(q, v.w[0] | u64(v.w[1]) << 32, __ATOMIC_RELAXED,
                     __HIP_MEMORY_SCOPE_SYSTEM);
  __hip_atomic_store(q + 1, v.w[2] | u64(v.w[3]) << 32, __ATOMIC_RELAXED,
                     __HIP_MEMORY_SCOPE_SYSTEM);
}
DEVICE u32 poll_word(const u32* p) {
  return __hip_atomic_load(p, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}
DEVICE void push_word(u32* p, u32 v) {
  __hip_atomic_store(p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}
DEVICE u32 exchange(u32* p, u32 v) {
  return __hip_atomic_exchange(p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
DEVICE void fence_system() { __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, ""); }
DEVICE u64 nanoseconds() { return __builtin_amdgcn_s_memrealtime() * 10; }  // 100 MHz

// There is no programmatic launch and there are no clusters.
DEVICE void wait_for_predecessor() {}
DEVICE void let_successor_start() {}
DEVICE u32 cluster_rank() { return 0; }
DEVICE void cluster_arrive_relaxed() {}
DEVICE void cluster_wait() {}
DEVICE void cluster_meet() {}
DEVICE void store_in_cluster(float*, u32, float) {}

DEVICE void block_meet() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
// Exchange within 32 lanes, half a wavefront.
DEVICE float shuffle_xor(float v, u32 mask) {
  const u32 lane = __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0));
  const int got =
      __builtin_amdgcn_ds_bpermute(int((lane ^ mask) * 4), __builtin_bit_cast(int, v));
  return __builtin_bit_cast(float, got);
}

DEVICE float as_float(u32 v) { return __builtin_bit_cast(float, v); }
DEVICE u32 as_word(float v) { return __builtin_bit_cast(u32, v); }
DEVICE float reciprocal_root(float v) { return __builtin_amdgcn_rsqf(v); }
DEVICE float root(float v) { return __builtin_sqrtf(v); }

DEVICE u32 pack_float16(float low, float high) {
  return __builtin_bit_cast(u16, static_cast<_Float16>(low)) |
         u32(__builtin_bit_cast(u16, static_cast<_Float16>(high))) << 16;
}
DEVICE float low_float16(u32 v) {
  return static_cast<float>(__builtin_bit_cast(_Float16, u16(v & 0xffffu)));
}
DEVICE float high_float16(u32 v) { return low_float16(v >> 16); }
DEVICE u32 bfloat16_bits(float v) {
  const u32 u = as_word(v);
  return v != v ? 0x7fffu : (u + 0x7fffu + (u >> 16 & 1u)) >> 16;  // nearest, ties to even
}
DEVICE u32 pack_bfloat16(float low, float high) {
  return bfloat16_bits(low) | bfloat16_bits(high) << 16;
}

#elif defined(FX_FUSION_EMULATED)
#include "gpu_emulator.h"  // of the tests: GPU threads as fibers of one process

#else  // NVIDIA
#define DEVICE __device__ __forceinline__
#define KERNEL extern "C" __global__
#define SHARED(type, name, count) __shared__ type name[2][count]
#define BOUNDS(threads, blocks) __launch_bounds__(threads, blocks)

DEVICE u32 thread_index() { return threadIdx.x; }
DEVICE u32 block_index() { return blockIdx.x; }

// Volatile assembly: neither moved in front of wait_for_predecessor nor made a ld.global.nc.
DEVICE Words load(const Words* p) {
  Words v;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
               : "l"(p)
               : "memory");
  return v;
}
DEVICE u64 load(const u64* p) {
  u64 v;
  asm volatile("ld.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
DEVICE u32 load(const u32* p) {
  u32 v;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
DEVICE u16 load(const u16* p) {
  u16 v;
  asm volatile("ld.global.u16 %0, [%1];" : "=h"(v) : "l"(p) : "memory");
  return v;
}
DEVICE float load(const float* p) { return __uint_as_float(load((const u32*)p)); }

DEVICE Words poll(const Words* p) {
  Words v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
               : "l"(p)
               : "memory");
  return v;
}
DEVICE void push(Words* p, Words v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(p), "r"(v.w[0]),
               "r"(v.w[1]), "r"(v.w[2]), "r"(v.w[3])
               : "memory");
}
DEVICE u32 poll_word(const u32* p) {
  u32 v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
DEVICE void push_word(u32* p, u32 v) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
DEVICE u32 exchange(u32* p, u32 v) {
  u32 old;
  asm volatile("atom.relaxed.gpu.global.exch.b32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(p), "r"(v)
               : "memory");
  return old;
}
DEVICE void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
DEVICE u64 nanoseconds() {
  u64 v;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(v)::"memory");
  return v;
}

#if __CUDA_ARCH__ >= 900
DEVICE void wait_for_predecessor() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DEVICE void let_successor_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}
DEVICE u32 cluster_rank() {
  u32 v;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(v));
  return v;
}
DEVICE void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
DEVICE void cluster_meet() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  cluster_wait();
}
// Store to the same variable of another block's shared memory.
DEVICE void store_in_cluster(float* p, u32 block, float v) {
  u32 there;
  const u32 here = static_cast<u32>(__cvta_generic_to_shared(p));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(block));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(v) : "memory");
}
#else
DEVICE void wait_for_predecessor() {}
DEVICE void let_successor_start() {}
DEVICE u32 cluster_rank() { return 0; }
DEVICE void cluster_arrive_relaxed() {}
DEVICE void cluster_wait() {}
DEVICE void cluster_meet() {}
DEVICE void store_in_cluster(float*, u32, float) {}
#endif

DEVICE void block_meet() { __syncthreads(); }
DEVICE float shuffle_xor(float v, u32 mask) { return __shfl_xor_sync(~0u, v, mask); }

DEVICE float as_float(u32 v) { return __uint_as_float(v); }
DEVICE u32 as_word(float v) { return __float_as_uint(v); }
DEVICE float reciprocal_root(float v) { return rsqrtf(v); }
DEVICE float root(float v) { return __fsqrt_rn(v); }

DEVICE u32 pack_float16(float low, float high) {
  u32 v;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  return v;
}
DEVICE float low_float16(u32 v) {
  float f;
  asm("{ .reg .b16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, a; }" : "=f"(f) : "r"(v));
  return f;
}
DEVICE float high_float16(u32 v) {
  float f;
  asm("{ .reg .b16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, b; }" : "=f"(f) : "r"(v));
  return f;
}
DEVICE u32 pack_bfloat16(float low, float high) {
  u32 v;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  return v;
}
#endif

// Two elements of a 16-bit dtype, rounded to nearest even, the first in the low half.
template <int DTYPE>
DEVICE u32 pack(float low, float high) {
  return DTYPE == kFloat16 ? pack_float16(low, high) : pack_bfloat16(low, high);
}
template <int DTYPE>
DEVICE float low_of(u32 v) {
  return DTYPE == kFloat16 ? low_float16(v) : as_float(v << 16);
}
template <int DTYPE>
DEVICE float high_of(u32 v) {
  return DTYPE == kFloat16 ? high_float16(v) : as_float(v & 0xffff0000u);
}
