// The loops over one run of elements. Included once per instruction set, each time inside another namespace.

template <typename T, typename Wire>
void pack_run(const T* __restrict__ from, Wire* __restrict__ to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = localsgd::encode<Wire>(from[i]);
}

template <typename T, typename Wire>
void apply_run(const Wire* __restrict__ from, T* __restrict__ to, int64_t n, typename Wide<Wire>::type divisor) {
  for (int64_t i = 0; i < n; ++i) to[i] = decode<T>(mean(from[i], divisor));
}

// As apply_run; adds to the sums. Sixteen partial sums in a fixed order let the compiler use vectors without reordering anything,
// and are folded into double block by block so that float does not run out of bits.
template <typename T, typename Wire>
void apply_measured_run(const Wire* __restrict__ from, T* __restrict__ to, int64_t n, typename Wide<Wire>::type divisor,
                        Sums& sums) {
  using W = typename Wide<Wire>::type;
  constexpr int64_t kLanes = 16, kFold = 1024;
  for (; n > 0; n -= kFold, from += kFold, to += kFold) {
    const int64_t count = n < kFold ? n : kFold;
    // Rounding to 16 bits keeps a loop that also sums from becoming vectors: it gets one of its own.
    Wire rounded[sizeof(Wire) == 2 ? kFold : 1];
    if constexpr (sizeof(Wire) == 2) {
      for (int64_t i = 0; i < count; ++i) rounded[i] = mean(from[i], divisor);
    }
    const auto average_of = [&](int64_t i) -> Wire {
      if constexpr (sizeof(Wire) == 2) {
        return rounded[i];
      } else {
        return mean(from[i], divisor);
      }
    };
    W distance[kLanes] = {}, norm[kLanes] = {};
    const auto add = [&](int64_t i, int64_t lane) {
      const Wire average = average_of(i);
      distance[lane] += distance_sq(to[i], average);
      norm[lane] += square(average);
      to[i] = decode<T>(average);
    };
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
#pragma GCC unroll 1  // an unrolled loop of known length is not made into vectors by GCC 12, and three times slower
      for (int64_t lane = 0; lane < kLanes; ++lane) add(i + lane, lane);
    }
    for (; i < count; ++i) add(i, 0);
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      sums.distance_sq += static_cast<double>(distance[lane]);
      sums.mean_sq += static_cast<double>(norm[lane]);
    }
  }
}
