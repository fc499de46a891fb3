// The loops over one block of codes, or one run of elements. Included once per instruction set, each time inside another namespace.

// 16-bit floats to float and back. Left to the compiler, conversion from and to Half is done bit by bit.
template <typename T>
void widen(const T* __restrict__ from, float* __restrict__ to, int64_t n) {
  int64_t i = 0;
#ifdef __F16C__
  if constexpr (std::is_same_v<T, c10::Half>) {
    for (; i + 8 <= n; i += 8) {
      _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
    }
  }
#endif
  for (; i < n; ++i) to[i] = static_cast<float>(from[i]);
}

template <typename T>
void narrow(const float* __restrict__ from, T* __restrict__ to, int64_t n) {
  int64_t i = 0;
#ifdef __F16C__
  if constexpr (std::is_same_v<T, c10::Half>) {
    for (; i + 8 <= n; i += 8) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                       _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    }
  }
#endif
  for (; i < n; ++i) to[i] = static_cast<T>(from[i]);
}

// begun[i]: see elementwise.h. For at most a block.
template <typename T, typename W>
void begun_run(const W* __restrict__ a, W* __restrict__ to, int64_t n) {
  if constexpr (sizeof(T) == 2) {
    T narrowed[kBlock];
    narrow(a, narrowed, n);
    widen(narrowed, to, n);
  } else {
    std::copy_n(a, n, to);
  }
}

// v[i] = x[i] - begun[i], for at most a block.
template <typename T, typename W>
void difference_run(const T* __restrict__ x, const W* __restrict__ a, W* __restrict__ v, int64_t n) {
  if constexpr (sizeof(T) == 2) {
    W wide[kBlock], from[kBlock];
    widen(x, wide, n);
    begun_run<T>(a, from, n);
    for (int64_t i = 0; i < n; ++i) v[i] = wide[i] - from[i];
  } else {
    for (int64_t i = 0; i < n; ++i) v[i] = x[i] - a[i];
  }
}

template <typename W>
void add_times_run(const W* __restrict__ from, W factor, W* __restrict__ to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] += factor * from[i];
}

template <typename W>
void times_run(const W* __restrict__ from, W factor, W* __restrict__ to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = factor * from[i];
}

// Encodes the block v, and leaves in it what that drops.
template <Code kCode, typename W>
void encode_block(W* __restrict__ v, char* codes, char* scale_to) {
  using Stored = typename Coding<kCode>::Stored;
  using Value = ValueOf<kCode>;
  alignas(32) Value value[kBlock];
  for (int64_t i = 0; i < kBlock; ++i) value[i] = static_cast<Value>(v[i]);
  float scale = 1.0f;
  if constexpr (Coding<kCode>::kScaled) {
    uint32_t largest = 0;
    for (int64_t i = 0; i < kBlock; ++i) largest = std::max(largest, magnitude(value[i]));
    scale = scale_of<kCode>(largest);
    const auto stored = static_cast<c10::BFloat16>(scale);
    std::memcpy(scale_to, &stored, sizeof(stored));
    if (!(scale > 0.0f)) {
      std::memset(codes, 0, Coding<kCode>::kBlockBytes);
      if (!is_finite(scale)) std::fill_n(v, kBlock, W(0));
      return;
    }
    const float inverse = inverse_of(scale);
    for (int64_t i = 0; i < kBlock; ++i) value[i] *= inverse;
  }
  alignas(32) Stored code[kBlock];
  if constexpr (std::is_same_v<Stored, c10::Half>) {
    narrow(value, code, kBlock);
    widen(code, value, kBlock);
    for (int64_t i = 0; i < kBlock; ++i) value[i] *= scale;
  } else {
    for (int64_t i = 0; i < kBlock; ++i) code[i] = to_code<kCode>(value[i]);
    for (int64_t i = 0; i < kBlock; ++i) value[i] = from_code<kCode>(code[i], scale);
  }
  for (int64_t i = 0; i < kBlock; ++i) v[i] = dropped(v[i], value[i]);
  if constexpr (kCode == Code::kInt4) {
    constexpr int64_t kHalf = kBlock / 2;
    for (int64_t i = 0; i < kHalf; ++i) codes[i] = static_cast<char>(two_codes(code[i], code[i + kHalf]));
  } else {
    std::memcpy(codes, code, sizeof(code));
  }
}

// total[i] += value[i].
template <Code kCode, typename W>
void add_block(const char* codes, const char* scale_from, W* __restrict__ total) {
  using Stored = typename Coding<kCode>::Stored;
  float scale = 1.0f;
  if constexpr (Coding<kCode>::kScaled) {
    c10::BFloat16 stored;
    std::memcpy(&stored, scale_from, sizeof(stored));
    scale = static_cast<float>(stored);
  }
  alignas(32) Stored code[kBlock];
  if constexpr (kCode == Code::kInt4) {
    constexpr int64_t kHalf = kBlock / 2;
    for (int64_t i = 0; i < kHalf; ++i) {
      code[i] = low_code(static_cast<uint8_t>(codes[i]));
      code[i + kHalf] = high_code(static_cast<uint8_t>(codes[i]));
    }
  } else {
    std::memcpy(code, codes, sizeof(code));
  }
  if constexpr (std::is_same_v<Stored, c10::Half>) {
    alignas(32) float value[kBlock];
    widen(code, value, kBlock);
    for (int64_t i = 0; i < kBlock; ++i) total[i] += static_cast<W>(value[i] * scale);
  } else {
    for (int64_t i = 0; i < kBlock; ++i) total[i] += static_cast<W>(from_code<kCode>(code[i], scale));
  }
}

template <typename W>
void divide_block(W* __restrict__ total, W divisor) {
  for (int64_t i = 0; i < kBlock; ++i) total[i] /= divisor;
}

// Moves the anchor for the progress d; see kernels.h. For at most a block.
template <typename W>
void outer_run(const Outer& outer, const W* __restrict__ d, W* __restrict__ a, W* __restrict__ m, int64_t n) {
  const auto lr = static_cast<W>(outer.lr), momentum = static_cast<W>(outer.momentum);
  if (outer.kind == OuterKind::kMean) {
    for (int64_t i = 0; i < n; ++i) a[i] += d[i];
  } else if (outer.kind == OuterKind::kGradient) {
    for (int64_t i = 0; i < n; ++i) m[i] = -d[i];
  } else if (m == nullptr) {
    for (int64_t i = 0; i < n; ++i) a[i] += lr * d[i];
  } else if (outer.nesterov) {
    for (int64_t i = 0; i < n; ++i) a[i] += lr * momentum_step(d[i], momentum, true, m[i]);
  } else {
    for (int64_t i = 0; i < n; ++i) a[i] += lr * momentum_step(d[i], momentum, false, m[i]);
  }
}

// mean[i] = begun[i] + d[i], for at most a block.
template <typename T, typename W>
void mean_run(const W* __restrict__ d, const W* __restrict__ a, W* __restrict__ mean, int64_t n) {
  begun_run<T>(a, mean, n);
  for (int64_t i = 0; i < n; ++i) mean[i] += d[i];
}

// Mean and progress d from the sum of the ranks' values, for at most a block.
template <typename T, typename W>
void progress_run(const W* __restrict__ sum, W divisor, const W* __restrict__ a, W* __restrict__ mean, W* __restrict__ d,
                  int64_t n) {
  begun_run<T>(a, d, n);
  for (int64_t i = 0; i < n; ++i) {
    mean[i] = sum[i] / divisor;
    d[i] = mean[i] - d[i];
  }
}

// Adds to the sums, in a fixed order; see apply_measured_run. For at most a block.
template <typename T, typename W>
void measure_run(const T* __restrict__ x, const W* __restrict__ mean, int64_t n, Sums& sums) {
  constexpr int64_t kLanes = 16;
  W local[kBlock];
  if constexpr (sizeof(T) == 2) {
    widen(x, local, n);
  } else {
    std::copy_n(x, n, local);
  }
  W distance[kLanes] = {}, norm[kLanes] = {};
  const auto add = [&](int64_t i, int64_t lane) {
    distance[lane] += distance_sq(local[i], mean[i]);
    norm[lane] += square(mean[i]);
  };
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
#pragma GCC unroll 1  // an unrolled loop of known length is not made into vectors by GCC 12
    for (int64_t lane = 0; lane < kLanes; ++lane) add(i + lane, lane);
  }
  for (; i < n; ++i) add(i, 0);
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    sums.distance_sq += static_cast<double>(distance[lane]);
    sums.mean_sq += static_cast<double>(norm[lane]);
  }
}

// Moves anchor and tensor for the progress d; see kernels.h. For at most a block.
template <typename T, typename W>
void land_run(const W* __restrict__ d, const Outer& outer, W* __restrict__ a, W* __restrict__ m, T* __restrict__ x, int64_t n) {
  outer_run(outer, d, a, m, n);
  if (outer.kind == OuterKind::kGradient) return;
  if constexpr (sizeof(T) == 2) {
    narrow(a, x, n);
  } else {
    std::copy_n(a, n, x);
  }
}

// All of that in one pass, for tensors of which the ranks' values have been summed: the loops above take three times as long.
// next(i, d) is where the anchor goes for the progress d.
template <typename W, typename Next>
void land_sum(const W* __restrict__ sum, W divisor, W* __restrict__ a, W* __restrict__ x, int64_t n, Sums& sums, const Next& next) {
  constexpr int64_t kLanes = 16, kFold = 1024;
  for (int64_t begin = 0; begin < n; begin += kFold) {
    const int64_t end = std::min(begin + kFold, n);
    W distance[kLanes] = {}, norm[kLanes] = {};
    const auto move = [&](int64_t i, int64_t lane) {
      const W mean = sum[i] / divisor;
      distance[lane] += distance_sq(x[i], mean);
      norm[lane] += square(mean);
      x[i] = a[i] = next(i, mean - a[i]);
    };
    int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes) {
#pragma GCC unroll 1  // see measure_run
      for (int64_t lane = 0; lane < kLanes; ++lane) move(i + lane, lane);
    }
    for (; i < end; ++i) move(i, 0);
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      sums.distance_sq += static_cast<double>(distance[lane]);
      sums.mean_sq += static_cast<double>(norm[lane]);
    }
  }
}

template <typename W>
void land_sum_run(const W* sum, W divisor, const Outer& outer, W* a, W* __restrict__ m, W* x, int64_t n, Sums& sums) {
  const auto lr = static_cast<W>(outer.lr), momentum = static_cast<W>(outer.momentum);
  if (m == nullptr) {
    land_sum(sum, divisor, a, x, n, sums, [=](int64_t i, W d) { return a[i] + lr * d; });
  } else if (outer.nesterov) {
    land_sum(sum, divisor, a, x, n, sums, [=](int64_t i, W d) { return a[i] + lr * momentum_step(d, momentum, true, m[i]); });
  } else {
    land_sum(sum, divisor, a, x, n, sums, [=](int64_t i, W d) { return a[i] + lr * momentum_step(d, momentum, false, m[i]); });
  }
}
