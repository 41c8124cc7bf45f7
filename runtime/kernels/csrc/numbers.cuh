// Element types without any toolkit header, so that a user needs no CUDA installation: NVRTC compiles this text alone.
// bf16 and f16 are storage; arithmetic is in float (in double for double).
// Every conversion has a portable form beside the instruction: the tests compile it for the CPU.
#pragma once

using i8 = signed char;
using u8 = unsigned char;
using u16 = unsigned short;
using i32 = int;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;

struct bf16 {
  u16 bits;
};
struct f16 {
  u16 bits;
};

// N elements that are loaded and stored as one access of sizeof(T) * N bytes (16 in the vector kernels).
template <class T, int N>
struct alignas(sizeof(T) * N) Pack {
  T at[N];
};

template <class T>
struct Accumulator {
  using type = float;
};
template <>
struct Accumulator<double> {
  using type = double;
};

__device__ __forceinline__ float widen(bf16 x) {
#ifdef __CUDA_ARCH__
  // As a shift, the compiler widens right behind each load and keeps twice the registers across the loads in flight.
  float wide;
  asm("{ .reg .b16 low; mov.b16 low, 0; mov.b32 %0, {low, %1}; }" : "=f"(wide) : "h"(x.bits));
  return wide;
#else
  return __uint_as_float(u32(x.bits) << 16);
#endif
}
__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ double widen(double x) { return x; }

__device__ __forceinline__ float widen(f16 x) {
#ifdef __CUDA_ARCH__
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
  return wide;
#else
  u32 sign = u32(x.bits & 0x8000) << 16, exponent = x.bits >> 10 & 31, fraction = x.bits & 1023;
  if (exponent == 31) return __uint_as_float(sign | 0x7f800000u | fraction << 13);
  if (exponent == 0) return __uint_as_float(sign | __float_as_uint(float(fraction) * 5.9604644775390625e-8f));  // 2^-24
  return __uint_as_float(sign | (exponent + 112) << 23 | fraction << 13);
#endif
}

__device__ __forceinline__ void narrow(float x, float& to) { to = x; }
__device__ __forceinline__ void narrow(double x, double& to) { to = x; }

__device__ __forceinline__ void narrow(float x, bf16& to) {
#ifdef __CUDA_ARCH__
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(to.bits) : "f"(x));
#else
  u32 bits = __float_as_uint(x);
  to.bits = x != x ? 0x7fff : u16(bits + 0x7fff + (bits >> 16 & 1) >> 16);
#endif
}

__device__ __forceinline__ void narrow(float x, f16& to) {
#ifdef __CUDA_ARCH__
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(to.bits) : "f"(x));
#else
  u32 bits = __float_as_uint(x), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
  if (size > 0x7f800000u) {
    to.bits = 0x7fff;
  } else if (size >= 0x47800000u) {  // 2^16 and above
    to.bits = u16(sign | 0x7c00);
  } else if (size < 0x38800000u) {  // below the least normal number, 2^-14: the sum rounds to a multiple of 2^-24
    to.bits = u16(sign | (__float_as_uint(__uint_as_float(size) + 0.5f) - 0x3f000000u));
  } else {
    to.bits = u16(sign | (size - 0x38000000u + 0xfff + (size >> 13 & 1)) >> 13);
  }
#endif
}

// fp8 e4m3 (no infinity, largest 448), round to nearest even. The caller keeps |x| <= 448.
__device__ __forceinline__ u8 to_e4m3(float x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  u16 pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x));
  return u8(pair);
#else
  u32 bits = __float_as_uint(x), sign = bits >> 24 & 0x80, size = bits & 0x7fffffff;
  if (size < 0x3c800000u) {  // below the least normal number, 2^-6: the sum rounds to a multiple of 2^-9
    return u8(sign | (__float_as_uint(__uint_as_float(size) + 16384.0f) - 0x46800000u));
  }
  u32 code = (size - 0x3c000000u + 0x7ffff + (size >> 20 & 1)) >> 20;
  return u8(sign | (code > 0x7e ? 0x7e : code));
#endif
}

__device__ __forceinline__ float from_e4m3(u8 code) {
  u32 sign = u32(code & 0x80) << 24, exponent = code >> 3 & 15, fraction = code & 7;
  if (exponent == 0) return __uint_as_float(sign | __float_as_uint(float(fraction) * 0.001953125f));  // 2^-9
  return __uint_as_float(sign | (exponent + 120) << 23 | fraction << 20);
}

// Shared memory whose size the launch gives.
#ifdef __CUDA_ARCH__
#define DYNAMIC_SHARED(type, name) extern __shared__ type name[]
#else
#ifndef DYNAMIC_SHARED
#define DYNAMIC_SHARED(type, name) type* name = nullptr  // the compiler's host pass, where no kernel body is used
#endif
#endif
