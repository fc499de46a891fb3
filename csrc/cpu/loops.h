// The loops over one run of elements. Included once per instruction set, each time inside another namespace.

template <typename T, typename Wire>
void pack_run(const T* __restrict__ from, Wire* __restrict__ to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = encode<Wire>(from[i]);
}

template <typename T, typename Wire>
void apply_run(const Wire* __restrict__ from, T* __restrict__ to, int64_t n, typename Wide<Wire>::type divisor) {
  for (int64_t i = 0; i < n; ++i) to[i] = decode<T>(mean(from[i], divisor));
}

// As apply_run; adds to the sums. Sixteen partial sums in a fixed order let the compiler use vectors without reordering anything,
// and are folded into double every 4096 elements so that float does not run out of bits.
template <typename T, typename Wire>
void apply_measured_run(const Wire* __restrict__ from, T* __restrict__ to, int64_t n, typename Wide<Wire>::type divisor,
                        Sums& sums) {
  using W = typename Wide<Wire>::type;
  constexpr int64_t kLanes = 16, kFold = 4096;
  for (int64_t begin = 0; begin < n; begin += kFold) {
    const int64_t end = begin + kFold < n ? begin + kFold : n;
    W distance[kLanes] = {}, norm[kLanes] = {};
    int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes) {
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        const Wire average = mean(from[i + lane], divisor);
        distance[lane] += distance_sq(to[i + lane], average);
        norm[lane] += square(average);
        to[i + lane] = decode<T>(average);
      }
    }
    for (; i < end; ++i) {
      const Wire average = mean(from[i], divisor);
      distance[0] += distance_sq(to[i], average);
      norm[0] += square(average);
      to[i] = decode<T>(average);
    }
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      sums.distance_sq += static_cast<double>(distance[lane]);
      sums.mean_sq += static_cast<double>(norm[lane]);
    }
  }
}
