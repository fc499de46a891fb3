// One warp moves a stretch of memory, element by element through an operation, in 16-byte accesses.
//
// All loads and stores of the bulk are 16 bytes wide and aligned, also where a tensor and its place in the bucket are not aligned
// to each other (one bias of odd length shifts everything after it): the side that is written sets the alignment, and the side that
// is read is put together from the aligned vectors around it.
#pragma once

#include <cstdint>
#include <cstring>

#include "launch.h"

namespace localsgd::cuda {

constexpr int kLanes = 32;
constexpr int kVector = 16;
using Vector = ulonglong2;

template <typename T>
__device__ __forceinline__ int past_vector(const T* pointer) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(pointer) % kVector);
}

// For addresses read from memory, of which the compiler cannot see that they are neither shared nor local.
template <typename T>
__device__ __forceinline__ T* in_global(T* pointer) {
  __builtin_assume(__isGlobal(pointer));
  return pointer;
}

// Plain accesses: a store by intrinsic is a stronger one, and the tensor's own values may not come from the read-only cache.
__device__ __forceinline__ Vector load(const Vector* pointer) {
  return *static_cast<const Vector*>(__builtin_assume_aligned(pointer, kVector));
}

__device__ __forceinline__ void store(Vector* pointer, const Vector& value) {
  *static_cast<Vector*>(__builtin_assume_aligned(pointer, kVector)) = value;
}

// The 16 bytes that begin `shift` bytes (below 16) into low:high.
__device__ __forceinline__ Vector straddle(const Vector& low, const Vector& high, int shift) {
  const bool upper = shift >= 8;
  const unsigned long long a = upper ? low.y : low.x;
  const unsigned long long b = upper ? high.x : low.y;
  const unsigned long long c = upper ? high.y : high.x;
  const int bits = shift % 8 * 8;
  // Shifted in two steps, as a shift by 64 is undefined.
  return {a >> bits | (b << 1) << (63 - bits), b >> bits | (c << 1) << (63 - bits)};
}

// One lane's share of the bulk: to[i] = op(from[i], to[i]) for groups lane, lane + 32, ... of kGroup elements. `to` is aligned;
// `from` lies `shift` bytes past an aligned address. Several groups are read before the first is written, to keep loads in flight.
template <int kGroup, bool kShifted, typename To, typename From, typename Op>
__device__ __forceinline__ void move_groups(const From* from, To* to, int groups, int lane, int shift, Op& op) {
  constexpr int kIn = kGroup * sizeof(From) / kVector, kOut = kGroup * sizeof(To) / kVector, kRead = kIn + kShifted;
  constexpr int kBatch = 4 / kIn;
  const auto* source = reinterpret_cast<const Vector*>(reinterpret_cast<const char*>(from) - shift);
  auto* target = reinterpret_cast<Vector*>(to);
  for (int first = lane; first < groups; first += kBatch * kLanes) {
    Vector raw[kBatch][kRead], own[kBatch][kOut];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int group = first + b * kLanes;
      if (group < groups) {
#pragma unroll
        for (int v = 0; v < kRead; ++v) raw[b][v] = __ldg(source + group * kIn + v);
        if constexpr (Op::kReadsTarget) {
#pragma unroll
          for (int v = 0; v < kOut; ++v) own[b][v] = load(target + group * kOut + v);
        }
      }
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int group = first + b * kLanes;
      if (group < groups) {
        if constexpr (kShifted) {
#pragma unroll
          for (int v = 0; v < kIn; ++v) raw[b][v] = straddle(raw[b][v], raw[b][v + 1], shift);
        }
        From in[kGroup];
        To out[kGroup];
        std::memcpy(static_cast<void*>(in), raw[b], sizeof(in));
        if constexpr (Op::kReadsTarget) std::memcpy(static_cast<void*>(out), own[b], sizeof(out));
#pragma unroll
        for (int i = 0; i < kGroup; ++i) out[i] = op(in[i], out[i]);
        std::memcpy(own[b], static_cast<const void*>(out), sizeof(out));
#pragma unroll
        for (int v = 0; v < kOut; ++v) store(target + group * kOut + v, own[b][v]);
      }
    }
  }
}

// to[i] = op(from[i], to[i]) for i in [0, n), by the lanes of one warp. Never touches memory outside the two ranges.
// n is no more than a piece holds, which an int counts.
template <typename To, typename From, typename Op>
__device__ __forceinline__ void move(const From* from, To* to, int n, int lane, Op& op) {
  constexpr int kGroup = kVector / static_cast<int>(sizeof(To) < sizeof(From) ? sizeof(To) : sizeof(From));
  int head = (kVector - past_vector(to)) % kVector / static_cast<int>(sizeof(To));
  const int shift = past_vector(from + head);
  // The aligned vector around the first group must not begin before `from`; a whole group more keeps `to` aligned.
  if (head * static_cast<int>(sizeof(From)) < shift) head += kGroup;
  head = min(head, n);
  int groups = (n - head) / kGroup;
  // Nor may the one around the last group end past it.
  if (shift != 0 && (n - head - groups * kGroup) * static_cast<int>(sizeof(From)) < kVector - shift) groups = max(groups - 1, 0);
  if (shift == 0) {
    move_groups<kGroup, false>(from + head, to + head, groups, lane, 0, op);
  } else {
    move_groups<kGroup, true>(from + head, to + head, groups, lane, shift, op);
  }
  // What is left at both ends, one element per lane and mostly in one pass.
  const int bulk = groups * kGroup;
  for (int i = lane; i < n - bulk; i += kLanes) {
    const int element = i < head ? i : i + bulk;
    to[element] = op(from[element], to[element]);
  }
}

}  // namespace localsgd::cuda
