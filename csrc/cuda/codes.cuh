// One warp encodes or decodes one block of 256 values, of which a lane holds lane, lane + 32, ...: so a warp always reads and
// writes consecutive memory whatever its alignment, the scale takes one reduction over the warp, and a lane holds both values of
// each byte of int4.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../kernels.h"
#include "launch.h"
#include "move.cuh"

namespace localsgd::cuda {

constexpr int kEach = kBlock / kLanes;  // values of a block that a lane holds

// What was received is not written to as long as a kernel runs.
template <typename Stored>
__device__ __forceinline__ Stored read(const char* data, int index) {
  // There is no such load of 16-bit floats.
  using Small = std::conditional_t<sizeof(Stored) == 2, unsigned short, unsigned char>;
  using Large = std::conditional_t<sizeof(Stored) == 8, unsigned long long, unsigned>;
  using Raw = std::conditional_t<(sizeof(Stored) < 4), Small, Large>;
  const Raw raw = __ldg(reinterpret_cast<const Raw*>(data) + index);
  Stored stored;
  std::memcpy(static_cast<void*>(&stored), &raw, sizeof(stored));
  return stored;
}

// Block number `block` of a chunk, decoded.
template <Code kCode>
__device__ __forceinline__ void decode_block(ValueOf<kCode> (&values)[kEach], const char* chunk, const Chunks& chunks,
                                             int64_t block, int lane) {
  using Stored = typename Coding<kCode>::Stored;
  const char* codes = chunk + codes_at<kCode>(block);
  float scale = 1;
  if constexpr (Coding<kCode>::kScaled) {
    scale = static_cast<float>(read<c10::BFloat16>(chunk + scale_at<kCode>(block, chunks.blocks), 0));
  }
  if constexpr (kCode == Code::kInt4) {
#pragma unroll
    for (int i = 0; i < kEach / 2; ++i) {
      const auto both = read<uint8_t>(codes, lane + i * kLanes);
      values[i] = from_code<kCode>(low_code(both), scale);
      values[i + kEach / 2] = from_code<kCode>(high_code(both), scale);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kEach; ++i) values[i] = from_code<kCode>(read<Stored>(codes, lane + i * kLanes), scale);
  }
}

// Writes the codes of a block, and leaves in `values` what they drop. Every lane of the warp must come here.
template <Code kCode, typename W>
__device__ __forceinline__ void encode_block(W (&values)[kEach], char* chunk, const Chunks& chunks, int64_t block, int lane) {
  using Stored = typename Coding<kCode>::Stored;
  char* codes = chunk + codes_at<kCode>(block);
  float scale = 1, inverse = 1;
  if constexpr (Coding<kCode>::kScaled) {
    uint32_t largest = 0;
    const auto raise = [&](uint32_t other) { largest = other > largest ? other : largest; };
#pragma unroll
    for (int i = 0; i < kEach; ++i) raise(magnitude(static_cast<float>(values[i])));
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) raise(__shfl_xor_sync(0xffffffffu, largest, step));
    scale = scale_of<kCode>(largest);
    inverse = inverse_of(scale);
    if (lane == 0) {
      *reinterpret_cast<c10::BFloat16*>(chunk + scale_at<kCode>(block, chunks.blocks)) = static_cast<c10::BFloat16>(scale);
    }
  }
  Stored stored[kEach];
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const auto narrow = static_cast<ValueOf<kCode>>(values[i]);
    if constexpr (Coding<kCode>::kScaled) {
      stored[i] = to_code<kCode>(inverse > 0.0f ? narrow * inverse : 0.0f);
    } else {
      stored[i] = to_code<kCode>(narrow);
    }
    values[i] = dropped(values[i], from_code<kCode>(stored[i], scale));
  }
  if constexpr (kCode == Code::kInt4) {
#pragma unroll
    for (int i = 0; i < kEach / 2; ++i) {
      reinterpret_cast<uint8_t*>(codes)[lane + i * kLanes] = two_codes(stored[i], stored[i + kEach / 2]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kEach; ++i) reinterpret_cast<Stored*>(codes)[lane + i * kLanes] = stored[i];
  }
}

// Mean of a block over the parts, which follow each other at `stride` bytes from `chunk` on.
template <Code kCode, typename W>
__device__ __forceinline__ void mean_block(W (&mean)[kEach], const char* chunk, int64_t stride, int64_t parts, W divisor,
                                           const Chunks& chunks, int64_t block, int lane) {
  // A single part is no sum: where its value is -0, so is the mean.
#pragma unroll
  for (int i = 0; i < kEach; ++i) mean[i] = parts == 1 ? W(-0.0) : W(0);
  for (int64_t part = 0; part < parts; ++part, chunk += stride) {
    ValueOf<kCode> values[kEach];
    decode_block<kCode>(values, chunk, chunks, block, lane);
#pragma unroll
    for (int i = 0; i < kEach; ++i) mean[i] += static_cast<W>(values[i]);
  }
  if (divisor == W(1)) return;
#pragma unroll
  for (int i = 0; i < kEach; ++i) mean[i] /= divisor;
}

}  // namespace localsgd::cuda
