// Runs CUDA kernels on the CPU, one block after the other, its threads as fibers that switch at barriers and warp operations.
// For tests: the order in which threads run between two barriers can be chosen, so a missing barrier changes the result, and
// a collective that not all threads of a warp reach ends the launch with an error.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
#define __align__(bytes) __attribute__((aligned(bytes)))
#define DYNAMIC_SHARED(type, name) type* name = reinterpret_cast<type*>(cpu::dynamic_shared.data())

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct Index {
  unsigned x;
};
static Index threadIdx, blockIdx, blockDim, gridDim;

namespace cpu {

constexpr unsigned WARP = 32;
enum class Kind { BARRIER, SHUFFLE, BALLOT, MATCH, SYNC };

struct Meeting {  // of the threads of one warp, or of a block
  unsigned members = 0, arrived = 0;
  unsigned long generation = 0;
  Kind kind = Kind::BARRIER;
};
struct Fiber {
  ucontext_t context;  // for its first start only: swapcontext makes two system calls, a jump none
  jmp_buf resume;
  bool started = false;
  std::vector<char> stack = std::vector<char>(128 * 1024);
  bool done = false;
};

static std::vector<char> dynamic_shared;
static std::vector<Fiber> fibers;
static std::vector<Meeting> warps;
static std::vector<uint64_t> values;  // [2][threads]: what each lane brought to its warp's meeting, by parity of generation
static Meeting block;
static ucontext_t origin;
static jmp_buf scheduler;
static std::function<void()> body;
static std::string failure;
static unsigned long steps;  // meetings passed by anyone: no step in a whole round means that all wait for ever

inline void yield() {
  if (_setjmp(fibers[threadIdx.x].resume) == 0) _longjmp(scheduler, 1);
}

inline void meet(Meeting& meeting, Kind kind) {
  if (meeting.arrived == 0) meeting.kind = kind;
  if (meeting.kind != kind && failure.empty()) failure = "threads of a warp met in different operations";
  unsigned long generation = meeting.generation;
  if (++meeting.arrived == meeting.members) {
    meeting.arrived = 0;
    ++meeting.generation;
    ++steps;
    return;
  }
  while (meeting.generation == generation) yield();
}

// Brings a value to the warp's meeting; returns all lanes' values.
template <class T>
const uint64_t* exchange(unsigned mask, T value, Kind kind) {
  if (mask != 0xffffffffu && failure.empty()) failure = "only full masks are emulated";
  unsigned self = threadIdx.x, threads = blockDim.x;
  Meeting& warp = warps[self / WARP];
  uint64_t* bank = values.data() + (warp.generation & 1) * threads;  // a lane is at most one meeting ahead of another
  uint64_t raw = 0;
  static_assert(sizeof(T) <= 8, "warp operations move at most 8 bytes");
  std::memcpy(&raw, &value, sizeof(T));
  bank[self] = raw;
  meet(warp, kind);
  return bank + self / WARP * WARP;
}

template <class T>
T from_raw(uint64_t raw) {
  T value;
  std::memcpy(&value, &raw, sizeof(T));
  return value;
}

inline void entry() {
  body();
  fibers[threadIdx.x].done = true;
  ++steps;
  _longjmp(scheduler, 1);
}

inline void resume(unsigned thread) {
  threadIdx.x = thread;
  if (_setjmp(scheduler) != 0) return;
  Fiber& fiber = fibers[thread];
  if (fiber.started) _longjmp(fiber.resume, 1);
  fiber.started = true;
  swapcontext(&origin, &fiber.context);
}

inline unsigned draw(uint64_t& random, unsigned below) {
  random = random * 6364136223846793005ull + 1442695040888963407ull;
  return unsigned(random >> 33) % below;
}

// Runs the unfinished threads in the given order once each; returns how many finished or passed a meeting.
inline unsigned long round_of(const std::vector<unsigned>& turn) {
  unsigned long before = steps;
  for (unsigned t : turn) {
    if (!fibers[t].done) resume(t);
  }
  return steps - before;
}

// Until all threads of the block are done. Order 0: all in rising order, round by round; 1: falling; else the seed of random
// orders, in which one warp at a time runs as far ahead of the others as barriers allow.
inline void run_block(unsigned threads, unsigned order, uint64_t& random) {
  auto unfinished = [&] {
    for (unsigned t = 0; t < threads; ++t) {
      if (!fibers[t].done) return true;
    }
    return false;
  };
  unsigned width = order > 1 ? WARP : threads;
  std::vector<unsigned> turn(width);
  std::vector<bool> stuck(threads / width, false);
  while (failure.empty() && unfinished()) {
    std::vector<unsigned> open;
    for (unsigned group = 0; group < stuck.size(); ++group) {
      if (!stuck[group]) open.push_back(group);
    }
    if (open.empty()) {
      failure = "threads wait for ever: not all of them reach the same barrier or warp operation";
      return;
    }
    unsigned group = order > 1 ? open[draw(random, unsigned(open.size()))] : 0;
    for (unsigned i = 0; i < width; ++i) turn[i] = group * width + (order == 1 ? width - 1 - i : i);
    unsigned long passed = 0;
    do {
      for (unsigned i = width - 1; order > 1 && i > 0; --i) std::swap(turn[i], turn[draw(random, i + 1)]);
      passed = round_of(turn);
      if (passed) stuck.assign(stuck.size(), false);
    } while (passed && failure.empty());
    stuck[group] = true;
  }
}

inline const char* run(unsigned grid, unsigned threads, size_t shared, unsigned order, const std::function<void()>& kernel) {
  failure.clear();
  gridDim.x = grid;
  blockDim.x = threads;
  if (fibers.size() < threads) fibers = std::vector<Fiber>(threads);
  body = kernel;
  uint64_t random = order;
  for (unsigned b = 0; b < grid && failure.empty(); ++b) {
    blockIdx.x = b;
    dynamic_shared.assign(shared, char(0xcd));
    warps.assign(threads / WARP, Meeting{WARP});
    values.assign(2 * threads, 0);
    block = Meeting{threads};
    for (unsigned t = 0; t < threads; ++t) {
      Fiber& fiber = fibers[t];
      fiber.done = fiber.started = false;
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.data();
      fiber.context.uc_stack.ss_size = fiber.stack.size();
      fiber.context.uc_link = nullptr;
      makecontext(&fiber.context, entry, 0);
    }
    run_block(threads, order, random);
  }
  return failure.empty() ? nullptr : failure.c_str();
}

struct Entry {
  std::vector<int> sizes;  // of the parameters
  std::function<std::function<void()>(void**)> bind;
};

inline std::map<std::string, Entry>& kernels() {
  static std::map<std::string, Entry> table;
  return table;
}

template <class... A, size_t... I>
Entry make_entry(void (*kernel)(A...), std::index_sequence<I...>) {
  return Entry{{int(sizeof(A))...}, [kernel](void** arguments) {
                 return [=] { kernel(*static_cast<std::remove_reference_t<A>*>(arguments[I])...); };
               }};
}

template <class... A>
bool add(const char* name, void (*kernel)(A...)) {
  kernels()[name] = make_entry(kernel, std::index_sequence_for<A...>{});
  return true;
}

}  // namespace cpu

inline void __syncthreads() { cpu::meet(cpu::block, cpu::Kind::BARRIER); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { cpu::exchange(mask, 0, cpu::Kind::SYNC); }

template <class T>
T __shfl_sync(unsigned mask, T value, unsigned lane) {
  return cpu::from_raw<T>(cpu::exchange(mask, value, cpu::Kind::SHUFFLE)[lane % cpu::WARP]);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, unsigned bits) {
  return cpu::from_raw<T>(cpu::exchange(mask, value, cpu::Kind::SHUFFLE)[(threadIdx.x ^ bits) % cpu::WARP]);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned by) {
  unsigned lane = threadIdx.x % cpu::WARP;
  return cpu::from_raw<T>(cpu::exchange(mask, value, cpu::Kind::SHUFFLE)[lane >= by ? lane - by : lane]);
}
inline unsigned __ballot_sync(unsigned mask, bool vote) {
  const uint64_t* all = cpu::exchange(mask, vote, cpu::Kind::BALLOT);
  unsigned bits = 0;
  for (unsigned lane = 0; lane < cpu::WARP; ++lane) bits |= unsigned(all[lane] != 0) << lane;
  return bits;
}
inline bool __any_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote) != 0; }
template <class T>
unsigned __match_any_sync(unsigned mask, T value) {
  const uint64_t* all = cpu::exchange(mask, value, cpu::Kind::MATCH);
  unsigned bits = 0;
  for (unsigned lane = 0; lane < cpu::WARP; ++lane) bits |= unsigned(all[lane] == all[threadIdx.x % cpu::WARP]) << lane;
  return bits;
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(unsigned x) { return __builtin_ffs(int(x)); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline int __float2int_rn(float x) { return x == x ? int(std::fmin(std::fmax(std::nearbyint(x), -2147483648.0f), 2147483520.0f)) : 0; }
inline float __uint_as_float(unsigned bits) { return cpu::from_raw<float>(bits); }
inline unsigned __float_as_uint(float x) {
  unsigned bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline unsigned long long atomicAdd(unsigned long long* at, unsigned long long value) {
  unsigned long long old = *at;
  *at += value;
  return old;
}
template <class T>
T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
T max(T a, T b) {
  return a < b ? b : a;
}

// Size of each parameter of a kernel, -1 for an unknown one; at most ``room`` are written.
extern "C" int cpu_parameters(const char* name, int* sizes, int room) {
  auto found = cpu::kernels().find(name);
  if (found == cpu::kernels().end()) return -1;
  int number = int(found->second.sizes.size());
  for (int i = 0; i < number && i < room; ++i) sizes[i] = found->second.sizes[i];
  return number;
}

// Null, or what went wrong.
extern "C" const char* cpu_launch(const char* name, unsigned grid, unsigned block, size_t shared, unsigned order, void** arguments) {
  return cpu::run(grid, block, shared, order, cpu::kernels().at(name).bind(arguments));
}
