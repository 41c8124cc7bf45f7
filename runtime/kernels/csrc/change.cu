// Change coding (EF21): both ends keep the same copy; the sender encodes the difference from it and both add what was encoded,
// so the copy converges to the exact values however coarse the code.
//
//   now, copy [length]    the values to send; the copy is updated in place
//   codes     [ceil(length / 4)] of 4 codes each    int8, or int4 (two a byte, the lower first)
//   scales    [ceil(length / group)] fp32           group = 128 for int8, 32 for int4
// The product and the sum are rounded one by one, so encoder and decoder agree bit for bit on any device.
#include "quads.cuh"

constexpr u32 BATCH = 4;  // stretches of 128 elements per warp and unit

template <class T>
__device__ __forceinline__ void add_change(T* __restrict__ copy, u64 at, u64 length, bool whole, const float* held, const float* change) {
  float sum[4];
#pragma unroll
  for (u32 e = 0; e < 4; ++e) sum[e] = __fadd_rn(held[e], change[e]);
  store_quad(sum, copy, at, length, whole);
}

template <class T, class C, u32 GROUP>
__device__ __forceinline__ void change_encode(const T* __restrict__ now, T* __restrict__ copy, typename C::Quad* __restrict__ codes,
                                              float* __restrict__ scales, u64 length, u32 whole) {
  u32 lane = threadIdx.x % 32;
  u64 units = (length + 128 * BATCH - 1) / (128 * BATCH);
  for (u64 unit = u64(blockIdx.x) * WARPS + threadIdx.x / 32; unit < units; unit += u64(gridDim.x) * WARPS) {
    u64 first = unit * (128 * BATCH) + lane * 4;
    float held[BATCH][4], change[BATCH][4];
#pragma unroll
    for (u32 b = 0; b < BATCH; ++b) {
      load_quad(now, first + b * 128, length, whole, change[b]);
      load_quad(copy, first + b * 128, length, whole, held[b]);
    }
#pragma unroll
    for (u32 b = 0; b < BATCH; ++b) {
      u64 at = first + b * 128;
#pragma unroll
      for (u32 e = 0; e < 4; ++e) change[b][e] -= held[b][e];
      float largest = group_max<GROUP / 4>(change[b]), scale = largest / C::LARGEST;
      typename C::Quad quad = encode_quad<C>(change[b], C::LARGEST / largest);
      if (at < length) {
        codes[at / 4] = quad;
        if (at % GROUP == 0) scales[at / GROUP] = scale;
      }
#pragma unroll
      for (u32 e = 0; e < 4; ++e) change[b][e] = __fmul_rn(C::decode(quad, e), scale);
      add_change(copy, at, length, whole, held[b], change[b]);
    }
  }
}

template <class T, class C, u32 GROUP>
__device__ __forceinline__ void change_decode(const typename C::Quad* __restrict__ codes, const float* __restrict__ scales,
                                              T* __restrict__ copy, u64 length, u32 whole) {
  u32 lane = threadIdx.x % 32;
  u64 units = (length + 128 * BATCH - 1) / (128 * BATCH);
  for (u64 unit = u64(blockIdx.x) * WARPS + threadIdx.x / 32; unit < units; unit += u64(gridDim.x) * WARPS) {
    u64 first = unit * (128 * BATCH) + lane * 4;
    float held[BATCH][4], change[BATCH][4];
#pragma unroll
    for (u32 b = 0; b < BATCH; ++b) {
      u64 at = first + b * 128;
      load_quad(copy, at, length, whole, held[b]);
      typename C::Quad quad = at < length ? codes[at / 4] : 0;
      float scale = at < length ? scales[at / GROUP] : 0.0f;
#pragma unroll
      for (u32 e = 0; e < 4; ++e) change[b][e] = __fmul_rn(C::decode(quad, e), scale);
    }
#pragma unroll
    for (u32 b = 0; b < BATCH; ++b) add_change(copy, first + b * 128, length, whole, held[b], change[b]);
  }
}

#define KERNELS(element, T, code, C, GROUP)                                                                                   \
  extern "C" __global__ void __launch_bounds__(32 * WARPS) change_encode_##element##_##code(                                  \
      const T* __restrict__ now, T* __restrict__ copy, C::Quad* __restrict__ codes, float* __restrict__ scales, u64 length,   \
      u32 whole) {                                                                                                            \
    change_encode<T, C, GROUP>(now, copy, codes, scales, length, whole);                                                      \
  }                                                                                                                           \
  extern "C" __global__ void __launch_bounds__(32 * WARPS) change_decode_##element##_##code(                                  \
      const C::Quad* __restrict__ codes, const float* __restrict__ scales, T* __restrict__ copy, u64 length, u32 whole) {     \
    change_decode<T, C, GROUP>(codes, scales, copy, length, whole);                                                           \
  }

KERNELS(bf16, bf16, int8, Int8, 128)
KERNELS(bf16, bf16, int4, Int4, 32)
KERNELS(f16, f16, int8, Int8, 128)
KERNELS(f16, f16, int4, Int4, 32)
KERNELS(f32, float, int8, Int8, 128)
KERNELS(f32, float, int4, Int4, 32)
