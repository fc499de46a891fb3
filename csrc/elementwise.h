// The arithmetic of one element, written once for host and device. No product here may be fused into an addition
// (-ffp-contract=off, --fmad=false), so that every engine gives the same bits.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
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

}  // namespace localsgd
