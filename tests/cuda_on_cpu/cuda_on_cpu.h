// Test only: enough of CUDA for g++ to compile the kernels of csrc/cuda themselves and run them.
//
// The threads of a block are fibers on one CPU thread. Each runs until it meets a barrier or a shuffle; the barrier opens when
// every thread of the block (of the warp's mask) that has not exited has come to the same one. Whatever can never open is an error
// instead of a hang. Blocks and threads start in an order drawn from `seed`, and shared memory holds no zeros by luck, so that a
// kernel which needs an order it does not enforce gives a wrong result.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <source_location>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
// One copy for all blocks: they run one after the other. In a section of its own, to be filled with poison before each block; g++
// ignores the section inside templates, so kernels declare their shared memory in functions that are none.
#define __shared__ static __attribute__((section("cuda_shared")))

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(16) ulonglong2 {
  unsigned long long x, y;
};
using cudaStream_t = struct CudaOnCpuStream*;

inline dim3 threadIdx, blockIdx, blockDim, gridDim;

extern "C" __attribute__((weak)) char __start_cuda_shared[], __stop_cuda_shared[];

namespace cuda_on_cpu {

constexpr unsigned char kPoison = 0xff;  // NaN as a float of any width
constexpr int kWarp = 32;

enum class State { kReady, kAtBarrier, kAtWarp, kExited };

struct Thread {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  State state;
  std::source_location where;
  // Of a warp operation: who takes part, whose value this lane wants, and where the values lie on the fibers' stacks.
  unsigned mask;
  int source;
  const void* value;
  void* result;
  size_t size;
};

struct Machine {
  ucontext_t scheduler;
  std::vector<Thread> threads;
  std::function<void()> body;
  std::string error;
  int current = 0;
  int count = 0;
  uint64_t seed = 0;                        // 0: in order
  std::map<uintptr_t, uintptr_t> readable;  // begin and end of what __ldg may touch; empty: anything

  Thread& self() { return threads[current]; }
};

inline Machine machine;

inline std::string describe(const std::source_location& where) {
  return std::string(where.file_name()) + ":" + std::to_string(where.line());
}

inline bool same(const std::source_location& a, const std::source_location& b) {
  return a.line() == b.line() && a.column() == b.column() && std::strcmp(a.file_name(), b.file_name()) == 0;
}

inline void suspend() { swapcontext(&machine.self().context, &machine.scheduler); }

// An error found by a thread: it never runs again.
[[noreturn]] inline void fail(const std::string& what) {
  machine.error = what;
  suspend();
  __builtin_unreachable();
}

inline void run_thread() {
  try {
    machine.body();
  } catch (const std::exception& error) {
    machine.error = error.what();
  }
  machine.self().state = State::kExited;
}

// Gives the value of lane `source`, or poison where that lane does not take part.
template <typename T>
T exchange(unsigned mask, T value, int source, const std::source_location& where) {
  static_assert(std::is_trivially_copyable_v<T>);
  if (!(mask >> machine.current % kWarp & 1)) fail("a lane outside its own mask at " + describe(where));
  T result;
  std::memset(&result, kPoison, sizeof(T));
  Thread& self = machine.self();
  self.state = State::kAtWarp;
  self.where = where;
  self.mask = mask;
  self.source = source;
  self.value = &value;
  self.result = &result;
  self.size = sizeof(T);
  suspend();
  return result;
}

// Lets the lanes of `lane`'s mask go on if all of them have come. An exited lane is not waited for.
inline bool release_warp(int lane) {
  const Thread& first = machine.threads[lane];
  const int base = lane / kWarp * kWarp;
  const auto takes_part = [&](int other) {
    return other < machine.count && (first.mask >> (other - base) & 1) && machine.threads[other].state != State::kExited;
  };
  for (int other = base; other < base + kWarp; ++other) {
    if (!takes_part(other)) continue;
    const Thread& thread = machine.threads[other];
    if (thread.state != State::kAtWarp || thread.mask != first.mask || !same(thread.where, first.where)) return false;
  }
  for (int other = base; other < base + kWarp; ++other) {
    if (!takes_part(other)) continue;
    Thread& thread = machine.threads[other];
    const int source = base + thread.source;
    if (takes_part(source)) std::memcpy(thread.result, machine.threads[source].value, thread.size);
  }
  for (int other = base; other < base + kWarp; ++other) {
    if (takes_part(other)) machine.threads[other].state = State::kReady;
  }
  return true;
}

// Opens the block's barrier, or throws: everyone waits, and no warp can go on.
inline void release_block() {
  const Thread* first = nullptr;
  for (int i = 0; i < machine.count; ++i) {
    const Thread& thread = machine.threads[i];
    if (thread.state == State::kExited) continue;
    if (first == nullptr) first = &thread;
    if (thread.state != State::kAtBarrier || !same(thread.where, first->where)) {
      throw std::runtime_error("mismatched barrier: threads of a block wait for ever at " + describe(first->where) + " and at " +
                               describe(thread.where));
    }
  }
  for (int i = 0; i < machine.count; ++i) {
    if (machine.threads[i].state == State::kAtBarrier) machine.threads[i].state = State::kReady;
  }
}

// A plain loop, which AddressSanitizer does not see: the section has its red zones inside.
__attribute__((no_sanitize("address"))) inline void poison_shared() {
  for (volatile char* byte = __start_cuda_shared; byte < __stop_cuda_shared; ++byte) *byte = static_cast<char>(kPoison);
}

inline void run_block(const std::vector<int>& order) {
  constexpr size_t kStack = 64 << 10;
  poison_shared();
  for (int i = 0; i < machine.count; ++i) {
    Thread& thread = machine.threads[i];
    if (!thread.stack) thread.stack.reset(new char[kStack]);
    thread.state = State::kReady;
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.get();
    thread.context.uc_stack.ss_size = kStack;
    thread.context.uc_link = &machine.scheduler;
    makecontext(&thread.context, run_thread, 0);
  }
  for (;;) {
    bool running = false;
    for (const int i : order) {
      if (machine.threads[i].state != State::kReady) continue;
      machine.current = i;
      threadIdx = {static_cast<unsigned>(i)};
      swapcontext(&machine.scheduler, &machine.threads[i].context);
      if (!machine.error.empty()) throw std::runtime_error(machine.error);
      running = true;
    }
    if (!running) return;
    bool released = false;
    for (const int i : order) released |= machine.threads[i].state == State::kAtWarp && release_warp(i);
    if (!released) release_block();
  }
}

inline std::vector<int> shuffled(int count, std::mt19937_64& random) {
  std::vector<int> order(count);
  std::iota(order.begin(), order.end(), 0);
  if (machine.seed != 0) std::shuffle(order.begin(), order.end(), random);
  return order;
}

template <typename T>
T* aligned(T* pointer, size_t bytes = sizeof(T)) {
  if (reinterpret_cast<uintptr_t>(pointer) % bytes != 0) fail("misaligned access of " + std::to_string(bytes) + " bytes");
  return pointer;
}

}  // namespace cuda_on_cpu

using CudaOnCpuWhere = std::source_location;

inline void __syncthreads(CudaOnCpuWhere where = CudaOnCpuWhere::current()) {
  cuda_on_cpu::machine.self().state = cuda_on_cpu::State::kAtBarrier;
  cuda_on_cpu::machine.self().where = where;
  cuda_on_cpu::suspend();
}

inline void __syncwarp(unsigned mask = 0xffffffffu, CudaOnCpuWhere where = CudaOnCpuWhere::current()) {
  cuda_on_cpu::exchange(mask, 0, 0, where);
}

template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, CudaOnCpuWhere where = CudaOnCpuWhere::current()) {
  const int lane = cuda_on_cpu::machine.current % cuda_on_cpu::kWarp;
  return cuda_on_cpu::exchange(mask, value, (lane & ~(width - 1)) | (source & (width - 1)), where);
}

template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, CudaOnCpuWhere where = CudaOnCpuWhere::current()) {
  const int lane = cuda_on_cpu::machine.current % cuda_on_cpu::kWarp, source = lane + static_cast<int>(delta);
  return cuda_on_cpu::exchange(mask, value, source / width == lane / width ? source : lane, where);
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32, CudaOnCpuWhere where = CudaOnCpuWhere::current()) {
  const int lane = cuda_on_cpu::machine.current % cuda_on_cpu::kWarp, source = lane ^ lane_mask;
  return cuda_on_cpu::exchange(mask, value, source / width <= lane / width ? source : lane, where);
}

template <typename T>
T __ldg(const T* pointer) {
  const auto& readable = cuda_on_cpu::machine.readable;
  const auto begin = reinterpret_cast<uintptr_t>(pointer);
  const auto next = readable.upper_bound(begin);
  if (!readable.empty() && (next == readable.begin() || std::prev(next)->second < begin + sizeof(T))) {
    cuda_on_cpu::fail("a load outside the data");
  }
  return *cuda_on_cpu::aligned(pointer);
}

// The promises that kernels make to the compiler are checked.
#define __builtin_assume(condition) (static_cast<bool>(condition) ? void() : cuda_on_cpu::fail("a wrong assumption"))
#define __builtin_assume_aligned(pointer, bytes) cuda_on_cpu::aligned(pointer, bytes)
inline bool __isGlobal(const void* pointer) { return pointer < __start_cuda_shared || pointer >= __stop_cuda_shared; }

// CUDA's own, which take int.
inline int min(int a, int b) { return std::min(a, b); }
inline int max(int a, int b) { return std::max(a, b); }

namespace localsgd::cuda {

// Runs the kernel to its end. Throws what a thread did wrong.
template <typename... Params, typename... Args>
void launch(void (*kernel)(Params...), int64_t blocks, int threads, cudaStream_t, Args... args) {
  auto& machine = cuda_on_cpu::machine;
  if (blocks < 1 || blocks > INT32_MAX || threads < 1 || threads > 1024) throw std::runtime_error("launch: bad grid");
  machine.body = [=] { kernel(static_cast<Params>(args)...); };
  machine.error.clear();
  machine.count = threads;
  if (machine.threads.size() < static_cast<size_t>(threads)) machine.threads.resize(threads);
  gridDim = {static_cast<unsigned>(blocks)};
  blockDim = {static_cast<unsigned>(threads)};
  std::mt19937_64 random(machine.seed);
  for (const int block : cuda_on_cpu::shuffled(static_cast<int>(blocks), random)) {
    blockIdx = {static_cast<unsigned>(block)};
    cuda_on_cpu::run_block(cuda_on_cpu::shuffled(threads, random));
  }
}

}  // namespace localsgd::cuda
