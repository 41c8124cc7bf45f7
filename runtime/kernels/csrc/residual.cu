// Sparse residual (HybridEP, SR compression): of ``value - shared`` only what reaches a threshold is sent, as value and place;
// decoding adds it onto the shared values. One pass each way.
//
//   value, shared [length]     threshold [1] fp32
//   values [capacity], places [capacity] uint16 (within a tile of TILE elements), in rising order of the element
//   starts [tiles + 1] int32   first entry of each tile, at most ``capacity``
//   status [2] int32           entries dropped for want of room; entries found before dropping
//   chain  [tiles + 1] uint64  work space, zero: a ticket counter, then each tile's total or running total, once known
//
// Encoding finds each tile's first entry by looking back over its predecessors' published totals (Merrill and Garland, "Single-pass
// parallel prefix scan with decoupled look-back"), so that the order is fixed though the blocks' order is not. Blocks take tiles by
// ticket, in rising order, and the next tile's elements while they wait for this one's predecessors: the lowest tile that is not
// done is the one that its block works on, so waiting ends. One 64-bit word carries the total and what it means, hence no fences.
#include "rows.cuh"

constexpr u32 THREADS = 32 * WARPS, TILE = 4096;
constexpr u64 OWN_TOTAL = 1, RUNNING_TOTAL = 2;  // low two bits of a chain word; 0: not known yet

// N elements at ``at``, 0 past the end.
template <class T, int N>
__device__ __forceinline__ Pack<T, N> load_pack(const T* __restrict__ from, u64 at, u64 length, bool aligned) {
  Pack<T, N> held = {};
  if (aligned && at + N <= length) {
    held = *reinterpret_cast<const Pack<T, N>*>(from + at);
  } else {
#pragma unroll
    for (u32 e = 0; e < N; ++e) {
      if (at + e < length) held.at[e] = from[at + e];
    }
  }
  return held;
}

// Sum of the totals of all tiles before ``tile``; the whole block calls it and reads as many of them at once: those that are
// under way have published no running total yet, and each further read costs a trip to the L2 cache. ``parts`` [WARPS] is shared.
__device__ __forceinline__ u64 look_back(volatile u64* chain, i64 tile, u64* parts) {
  u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  u64 sum = 0;
  for (i64 at = tile - 1 - threadIdx.x;; at -= THREADS) {
    u64 word;
    do {
      word = at >= 0 ? u64(chain[at]) : u64(RUNNING_TOTAL);  // before the first tile: a running total of 0
    } while (__any_sync(ALL, (word & 3) == 0));
    u32 running = __ballot_sync(ALL, (word & 3) == RUNNING_TOTAL);
    u32 last = running ? __ffs(running) - 1 : 31;
    u64 part = lane <= last ? word >> 2 : 0;
#pragma unroll
    for (u32 step = 16; step > 0; step /= 2) part += __shfl_xor_sync(ALL, part, step);
    if (lane == 0) parts[warp] = part << 1 | (running != 0);
    __syncthreads();
    bool ended = false;
#pragma unroll
    for (u32 w = 0; w < WARPS; ++w) {
      if (!ended) sum += parts[w] >> 1;
      ended |= parts[w] & 1;
    }
    if (ended) return sum;
    __syncthreads();  // the next round writes parts again
  }
}

template <class T, int N>
__device__ __forceinline__ void residual_encode(const T* __restrict__ value, const T* __restrict__ shared,
                                                const float* __restrict__ threshold, u64* chain, T* __restrict__ values,
                                                u16* __restrict__ places, i32* __restrict__ starts, i32* __restrict__ status,
                                                u64 length, u32 tiles, u32 capacity, u32 aligned) {
  constexpr u32 PACKS = TILE / (THREADS * N);  // per thread; at most 4, whose counts share one 64-bit word
  __shared__ u32 ticket;
  __shared__ u64 warp_counts[WARPS], parts[WARPS];
  u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  u64* tickets = chain;
  volatile u64* published = chain + 1;
  float least = *threshold;
  Pack<T, N> held[PACKS], base[PACKS];
  auto load = [&](u32 tile) {
#pragma unroll
    for (u32 p = 0; p < PACKS; ++p) {
      u64 at = u64(tile) * TILE + (p * THREADS + threadIdx.x) * N;
      held[p] = load_pack<T, N>(value, at, length, aligned);
      base[p] = load_pack<T, N>(shared, at, length, aligned);
    }
  };
  if (threadIdx.x == 0) ticket = u32(atomicAdd(tickets, u64(1)));
  __syncthreads();
  u32 tile = ticket;
  load(tile);
  while (tile < tiles) {
    __syncthreads();  // all have read the ticket and the counts of the tile before
    if (threadIdx.x == 0) ticket = u32(atomicAdd(tickets, u64(1)));
    Pack<T, N> residual[PACKS];
    u32 chosen[PACKS];
    u64 counts = 0;  // of pack p in bits 16 p ...: a tile has at most 4096 entries
#pragma unroll
    for (u32 p = 0; p < PACKS; ++p) {
      chosen[p] = 0;
#pragma unroll
      for (u32 e = 0; e < N; ++e) {
        float change = widen(held[p].at[e]) - widen(base[p].at[e]);
        u64 at = u64(tile) * TILE + (p * THREADS + threadIdx.x) * N + e;
        bool keep = at < length && !(fabsf(change) < least);  // a NaN is sent, not hidden
        chosen[p] |= u32(keep) << e;
        narrow(change, residual[p].at[e]);
      }
      counts |= u64(__popc(chosen[p])) << (16 * p);
    }
    u64 sum = counts;
#pragma unroll
    for (u32 step = 1; step < 32; step *= 2) {
      u64 other = __shfl_up_sync(ALL, sum, step);
      if (lane >= step) sum += other;
    }
    if (lane == 31) warp_counts[warp] = sum;
    __syncthreads();
    u32 next = ticket;
    load(next);  // on their way while the block waits for what comes before this tile
    u64 earlier = sum - counts, totals = 0;
#pragma unroll
    for (u32 w = 0; w < WARPS; ++w) {
      if (w < warp) earlier += warp_counts[w];
      totals += warp_counts[w];
    }
    u32 total = 0;
#pragma unroll
    for (u32 p = 0; p < PACKS; ++p) total += u32(totals >> (16 * p)) & 0xffff;
    if (threadIdx.x == 0 && tile > 0) published[tile] = u64(total) << 2 | OWN_TOTAL;
    u64 to = look_back(published, tile, parts);
    if (threadIdx.x == 0) {
      u64 found = to + total;
      published[tile] = found << 2 | RUNNING_TOTAL;
      starts[tile] = i32(min(to, u64(capacity)));
      if (tile == tiles - 1) {
        starts[tiles] = i32(min(found, u64(capacity)));
        status[0] = i32(found - min(found, u64(capacity)));
        status[1] = i32(found);
      }
    }
#pragma unroll
    for (u32 p = 0; p < PACKS; ++p) {
      u64 place = to + (u32(earlier >> (16 * p)) & 0xffff);
#pragma unroll
      for (u32 e = 0; e < N; ++e) {
        if (chosen[p] >> e & 1) {
          if (place < capacity) {
            values[place] = residual[p].at[e];
            places[place] = u16((p * THREADS + threadIdx.x) * N + e);
          }
          ++place;
        }
      }
      to += u32(totals >> (16 * p)) & 0xffff;
    }
    tile = next;
  }
}

template <class T, int N>
__device__ __forceinline__ void residual_decode(const T* __restrict__ shared, const T* __restrict__ values,
                                                const u16* __restrict__ places, const i32* __restrict__ starts, T* __restrict__ out,
                                                u64 length, u32 aligned) {
  constexpr u32 PACKS = TILE / (THREADS * N);
  __shared__ __align__(16) T tile[TILE];
  u64 first = u64(blockIdx.x) * TILE;
  i32 entry = starts[blockIdx.x] + threadIdx.x, end = starts[blockIdx.x + 1];
#pragma unroll
  for (u32 p = 0; p < PACKS; ++p) {
    u32 at = (p * THREADS + threadIdx.x) * N;
    *reinterpret_cast<Pack<T, N>*>(tile + at) = load_pack<T, N>(shared, first + at, length, aligned);
  }
  __syncthreads();
  for (; entry < end; entry += THREADS) {
    u32 at = places[entry];  // each place occurs once
    if (at < TILE) narrow(widen(tile[at]) + widen(values[entry]), tile[at]);
  }
  __syncthreads();
#pragma unroll
  for (u32 p = 0; p < PACKS; ++p) {
    u32 at = (p * THREADS + threadIdx.x) * N;
    Pack<T, N> held = *reinterpret_cast<const Pack<T, N>*>(tile + at);
    if (aligned && first + at + N <= length) {
      *reinterpret_cast<Pack<T, N>*>(out + first + at) = held;
    } else {
#pragma unroll
      for (u32 e = 0; e < N; ++e) {
        if (first + at + e < length) out[first + at + e] = held.at[e];
      }
    }
  }
}

// Blocks of THREADS: as many as there are tiles for decoding, any number for encoding.
#define KERNELS(element, T, N)                                                                                                \
  extern "C" __global__ void __launch_bounds__(THREADS, 3) residual_encode_##element(                                            \
      const T* __restrict__ value, const T* __restrict__ shared, const float* __restrict__ threshold, u64* chain,             \
      T* __restrict__ values, u16* __restrict__ places, i32* __restrict__ starts, i32* __restrict__ status, u64 length,       \
      u32 tiles, u32 capacity, u32 aligned) {                                                                                 \
    residual_encode<T, N>(value, shared, threshold, chain, values, places, starts, status, length, tiles, capacity, aligned); \
  }                                                                                                                           \
  extern "C" __global__ void __launch_bounds__(THREADS) residual_decode_##element(                                            \
      const T* __restrict__ shared, const T* __restrict__ values, const u16* __restrict__ places,                             \
      const i32* __restrict__ starts, T* __restrict__ out, u64 length, u32 aligned) {                                         \
    residual_decode<T, N>(shared, values, places, starts, out, length, aligned);                                              \
  }

KERNELS(bf16, bf16, 8)
KERNELS(f16, f16, 8)
KERNELS(f32, float, 4)
