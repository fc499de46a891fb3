// Test only: random buckets, in memory of just their size so that AddressSanitizer sees the first byte beyond it.
#pragma once

#include <sanitizer/asan_interface.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "../../csrc/cuda/launch.h"
#include "../../csrc/kernels.h"

using namespace localsgd;

enum class Fault { kNone, kShort, kOdd };
enum class Content { kIntegers, kNormal, kSpecial, kBytes };

inline bool on_cuda = false;
inline Fault fault = Fault::kNone;
inline std::mt19937_64 rng;

inline int64_t below(int64_t limit) { return static_cast<int64_t>(rng() % static_cast<uint64_t>(limit)); }

inline void check(bool good, const char* what) {
  if (!good) throw std::runtime_error(what);
}

// `bytes` bytes, `past` beyond an aligned address. Reads ahead of them are seen down to the 8 bytes that share a shadow byte,
// writes all.
class Memory {
 public:
  Memory(int64_t bytes, int64_t past) : past_(past), bytes_(bytes), base_(new char[past + bytes]) {
    std::memset(base_.get(), kGuard, past);
    std::memset(data(), 0xff, bytes);  // NaN in every type
    ASAN_POISON_MEMORY_REGION(base_.get(), past / 8 * 8);
  }
  ~Memory() { ASAN_UNPOISON_MEMORY_REGION(base_.get(), past_); }
  Memory(const Memory&) = delete;

  char* data() const { return base_.get() + past_; }
  int64_t bytes() const { return bytes_; }
  std::map<uintptr_t, uintptr_t> readable() const {
    const auto begin = reinterpret_cast<uintptr_t>(data());
    return {{begin, begin + bytes_}};
  }
  void check_guard() const {
    for (int64_t i = past_ / 8 * 8; i < past_; ++i) check(base_[i] == kGuard, "a write ahead of the data");
  }

 private:
  static constexpr char kGuard = 0x5a;
  int64_t past_, bytes_;
  std::unique_ptr<char[]> base_;
};

template <typename T>
T draw(Content content, int64_t factor) {
  if constexpr (!std::is_same_v<T, uint8_t>) {
    using Limits = std::numeric_limits<T>;
    using W = std::conditional_t<std::is_same_v<T, double>, double, float>;
    const auto wide = [](auto value) { return static_cast<T>(static_cast<W>(value)); };
    if (content == Content::kIntegers) return wide((below(17) - 8) * factor);
    if (content == Content::kSpecial && below(3) == 0) {
      const T values[] = {wide(0.0),      wide(-0.0),         Limits::denorm_min(), Limits::min(),
                          Limits::max(),  Limits::lowest(),   Limits::infinity(),   wide(65519.0),  // rounds to the largest half
                          wide(65520.0f), wide(1.00048828125)};                                     // halfway between halves
      return values[below(std::size(values))];
    }
    return wide(static_cast<double>(below(1 << 24)) / (1 << 22) - 2.0);
  }
  return T{};
}

// Elements of T as bytes of any address.
template <typename T>
T get(const char* data, int64_t i) {
  T value;
  std::memcpy(static_cast<void*>(&value), data + i * sizeof(T), sizeof(T));
  return value;
}
template <typename T>
void put(char* data, int64_t i, T value) {
  std::memcpy(data + i * sizeof(T), static_cast<const void*>(&value), sizeof(T));
}

template <typename T>
void fill(char* data, int64_t numel, Content content, int64_t factor) {
  for (int64_t i = 0; i < numel; ++i) {
    if (content != Content::kBytes) put(data, i, draw<T>(content, factor));
  }
  for (int64_t i = 0; content == Content::kBytes && i < static_cast<int64_t>(numel * sizeof(T)); ++i) data[i] = rng() & 0xff;
}

// Sizes on both sides of: a vector, a warp's pass, the CPU's fold, the pieces of either engine.
inline int64_t draw_numel(size_t itemsize) {
  const int64_t size = static_cast<int64_t>(itemsize), kind = below(on_cuda ? 40 : 100);
  if (kind < 16) return 1 + below(40);
  const int64_t edges[] = {32, 64, 128, 16 / size, 512 / size, 2048 / size, 4096 / size, 8192 / size, 4096};
  const int64_t edge = kind > 0 && kind < 98 && kind != 39 ? edges[below(kind < 36 ? 6 : std::size(edges))]
                       : on_cuda                           ? 32768 / size
                                                           : 65536 * (1 + below(2));
  return std::max<int64_t>(1, edge - 20 + below(41));
}

inline void check_sum(double got, double expected, Content content) {
  if (content == Content::kIntegers) check(got == expected, "a sum of integers is not exact");
  if (content == Content::kNormal) check(std::abs(got - expected) <= 2e-5 * expected, "a sum is too far off");
}

// Tensors of one bucket, and a copy of what they hold.
template <typename T>
class Tensors {
 public:
  explicit Tensors(Content content) {
    constexpr auto kSize = static_cast<int64_t>(sizeof(T));
    const int64_t count = below(30) == 0 ? below(200) : below(7), parameters = below(count + 1);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t n = count > 7 ? 1 + below(30) : draw_numel(sizeof(T));
      const int64_t past = below(32 / kSize) * kSize + (fault == Fault::kOdd);
      memory_.push_back(std::make_unique<Memory>((n - (fault == Fault::kShort)) * kSize, past));
      const Memory& added = *memory_.back();
      fill<T>(added.data(), added.bytes() / kSize, content, 1);
      original.insert(original.end(), added.data(), added.data() + added.bytes());
      segments.push_back({added.data(), numel, n});
      numel += n;
      if (i < parameters) drift_numel = numel;
    }
    segments.shrink_to_fit();
  }

  Bucket bucket() const { return {segments.data(), static_cast<int64_t>(segments.size()), numel, drift_numel}; }
  // What __ldg may touch.
  std::map<uintptr_t, uintptr_t> readable() const {
    std::map<uintptr_t, uintptr_t> result;
    for (const auto& each : memory_) result.merge(each->readable());
    return result;
  }
  void check_guards() const {
    for (const auto& each : memory_) each->check_guard();
  }

  std::vector<Segment> segments;
  std::vector<char> original;
  int64_t numel = 0, drift_numel = 0;

 private:
  std::vector<std::unique_ptr<Memory>> memory_;
};
