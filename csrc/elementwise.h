// The arithmetic of one element, written once for host and device. No product here may be fused into an addition
// (-ffp-contract=off, --fmad=false), so that every engine gives the same bits.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__CUDACC__) || defined(LOCALSGD_CUDA_ON_CPU)
#define LOCALSGD_HD __host__ __device__ __forceinline__
#else
#define LOCALSGD_HD inline __attribute__((always_inline))
#endif

namespace localsgd {

// Arithmetic happens in float, in double for double.
template <typename T>
struct Wide {
  using type = float;
};
template <>
struct Wide<double> {
  using type = double;
};

// Value of a tensor -> what is handed to the collective.
template <typename Wire, typename T>
LOCALSGD_HD Wire encode(T value) {
  return static_cast<Wire>(static_cast<typename Wide<Wire>::type>(value));
}

// Sum over the ranks -> mean, rounded once to the wire's type.
template <typename Wire>
LOCALSGD_HD Wire mean(Wire sum, typename Wide<Wire>::type divisor) {
  return static_cast<Wire>(static_cast<typename Wide<Wire>::type>(sum) / divisor);
}

// Mean -> value of a tensor.
template <typename T, typename Wire>
LOCALSGD_HD T decode(Wire value) {
  if constexpr (std::is_same_v<T, Wire>) {
    return value;
  } else {
    return static_cast<T>(static_cast<typename Wide<Wire>::type>(value));
  }
}

// Squared distance of a rank's own value to the mean.
template <typename T, typename Wire>
LOCALSGD_HD typename Wide<Wire>::type distance_sq(T local, Wire mean) {
  using W = typename Wide<Wire>::type;
  const W difference = static_cast<W>(local) - static_cast<W>(mean);
  return difference * difference;
}

template <typename Wire>
LOCALSGD_HD typename Wide<Wire>::type square(Wire value) {
  using W = typename Wide<Wire>::type;
  return static_cast<W>(value) * static_cast<W>(value);
}

// How the difference to the anchor is written where that drops bits; described in wire.py, and numbered as there.
enum class Code : int { kFloat64, kFloat32, kBFloat16, kFloat16, kInt8, kInt4 };

constexpr int64_t kBlock = 256;  // values that share a scale

// As many bits of code as a value has; int4 goes by whole bytes of two values, i and i + 128 of a block.
template <Code kCode>
struct Coding {
  static constexpr bool kScaled = true;
  static constexpr int64_t kBlockBytes = kBlock * (kCode == Code::kInt4 ? 1 : kCode == Code::kInt8 ? 2 : 4) / 2;
  static constexpr float kLevels = kCode == Code::kInt4 ? 7.0f : 127.0f;
  using Stored = std::conditional_t<kCode == Code::kFloat16, c10::Half, int8_t>;
};
template <>
struct Coding<Code::kFloat64> {
  static constexpr bool kScaled = false;
  static constexpr int64_t kBlockBytes = kBlock * 8;
  using Stored = double;
};
template <>
struct Coding<Code::kFloat32> {
  static constexpr bool kScaled = false;
  static constexpr int64_t kBlockBytes = kBlock * 4;
  using Stored = float;
};
template <>
struct Coding<Code::kBFloat16> {
  static constexpr bool kScaled = false;
  static constexpr int64_t kBlockBytes = kBlock * 2;
  using Stored = c10::BFloat16;
};

// In which values are encoded and decoded.
template <Code kCode>
using ValueOf = std::conditional_t<kCode == Code::kFloat64, double, float>;

LOCALSGD_HD uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

LOCALSGD_HD float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Without its sign; as whole numbers these are in the order of the absolute values, with inf and NaN at the end.
LOCALSGD_HD uint32_t magnitude(float value) { return bits_of(value) & 0x7fffffffu; }

constexpr uint32_t kInfinity = 0x7f800000u;

LOCALSGD_HD bool is_finite(float value) { return magnitude(value) < kInfinity; }
LOCALSGD_HD bool is_finite(double value) { return value - value == 0.0; }

// Scale of a block whose largest magnitude is this: a bfloat16 in a float. 0 where it would be subnormal: all codes are 0 then. NaN
// where the block holds NaN or inf.
template <Code kCode>
LOCALSGD_HD float scale_of(uint32_t largest) {
  if (largest >= kInfinity) return float_of(0x7fc00000u);
  uint32_t bits;
  if constexpr (kCode == Code::kFloat16) {
    constexpr uint32_t kTop = 14u << 23;  // makes the largest value less than 2^15
    bits = largest & kInfinity;
    bits = bits > kTop ? bits - kTop : 0;
  } else {
    // Rounded up, so that no value is clipped.
    bits = (bits_of(float_of(largest) * (1.0f / Coding<kCode>::kLevels)) + 0xffffu) & 0xffff0000u;
  }
  return bits < 0x00800000u ? 0.0f : float_of(bits);
}

// By which the values of a block are multiplied; 0 where they are all lost.
LOCALSGD_HD float inverse_of(float scale) { return scale > 0.0f ? 1.0f / scale : 0.0f; }

// Value times inverse of its scale -> code. Values of a block with the scale 0 or NaN must be replaced by 0 before: NaN is no
// integer.
template <Code kCode>
LOCALSGD_HD typename Coding<kCode>::Stored to_code(ValueOf<kCode> value) {
  using Stored = typename Coding<kCode>::Stored;
  if constexpr (std::is_same_v<Stored, int8_t>) {
    return static_cast<int8_t>(static_cast<int>(rintf(value)));
  } else {
    return static_cast<Stored>(value);
  }
}

// Code -> value, the same one everywhere: the product is exact, or rounded once.
template <Code kCode>
LOCALSGD_HD ValueOf<kCode> from_code(typename Coding<kCode>::Stored code, float scale) {
  if constexpr (Coding<kCode>::kScaled) {
    return static_cast<float>(code) * scale;
  } else {
    return static_cast<ValueOf<kCode>>(code);
  }
}

LOCALSGD_HD uint8_t two_codes(int8_t low, int8_t high) {
  return static_cast<uint8_t>((static_cast<uint8_t>(low) & 15u) | (static_cast<uint8_t>(high) << 4));
}
LOCALSGD_HD int8_t low_code(uint8_t both) { return static_cast<int8_t>(static_cast<int8_t>(both << 4) >> 4); }
LOCALSGD_HD int8_t high_code(uint8_t both) { return static_cast<int8_t>(static_cast<int8_t>(both) >> 4); }

// What a code has dropped of a value; nothing is kept of what is not finite.
template <typename W, typename Value>
LOCALSGD_HD W dropped(W value, Value sent) {
  const W rest = value - static_cast<W>(sent);
  return is_finite(rest) ? rest : W(0);
}

// Where a tensor of type T began the round: at the anchor, as it fits in its type.
template <typename T, typename W>
LOCALSGD_HD W begun(W anchor) {
  if constexpr (std::is_same_v<T, W>) {
    return anchor;
  } else {
    return static_cast<W>(static_cast<T>(anchor));
  }
}

// What becomes of the anchor where the mean progress of a round is d; described in outer.py, and numbered as in native.py.
enum class OuterKind : int { kMean, kSGD, kGradient };

struct Outer {
  OuterKind kind;
  double lr;
  double momentum;
  bool nesterov;
};

// m <- momentum * m + d; gives how far the anchor moves, for lr = 1.
template <typename W>
LOCALSGD_HD W momentum_step(W d, W momentum, bool nesterov, W& m) {
  m = momentum * m + d;
  return nesterov ? momentum * m + d : m;
}

}  // namespace localsgd
