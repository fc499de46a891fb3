// Test only: the CPU kernels and, emulated, the CUDA kernels on random buckets, against a plain loop. Every tensor and every
// staging buffer is a heap allocation of just its size, so that AddressSanitizer sees the first byte beyond it.
//
//   driver cpu|cuda SEED COUNT [short|odd]
//
// `short` and `odd` do something wrong: tensors one element shorter than the bucket says, or at an odd address.
#include <ATen/Parallel.h>
#include <sanitizer/asan_interface.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
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

#include "../../csrc/cuda/kernels.cuh"
#include "../../csrc/kernels.h"

using namespace localsgd;

// Fibers and fake stacks do not mix. Leaks are not looked for: that needs ptrace, which containers may forbid.
extern "C" const char* __asan_default_options() { return "detect_stack_use_after_return=0:detect_leaks=0"; }
extern "C" const char* __ubsan_default_options() { return "print_stacktrace=1"; }

namespace {

enum class Fault { kNone, kShort, kOdd };
enum class Content { kIntegers, kNormal, kSpecial, kBytes };

bool on_cuda = false;
Fault fault = Fault::kNone;
std::mt19937_64 rng;

int64_t below(int64_t limit) { return static_cast<int64_t>(rng() % static_cast<uint64_t>(limit)); }

void check(bool good, const char* what) {
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
T at(const char* data, int64_t i) {
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
int64_t draw_numel(size_t itemsize) {
  const int64_t size = static_cast<int64_t>(itemsize), kind = below(on_cuda ? 40 : 100);
  if (kind < 16) return 1 + below(40);
  const int64_t edges[] = {32, 64, 128, 16 / size, 512 / size, 2048 / size, 4096 / size, 8192 / size, 4096};
  const int64_t edge = kind > 0 && kind < 98 && kind != 39 ? edges[below(kind < 36 ? 6 : std::size(edges))]
                       : on_cuda                           ? 32768 / size
                                                           : 65536 * (1 + below(2));
  return std::max<int64_t>(1, edge - 20 + below(41));
}

void check_sum(double got, double expected, Content content) {
  if (content == Content::kIntegers) check(got == expected, "a sum of integers is not exact");
  if (content == Content::kNormal) check(std::abs(got - expected) <= 2e-5 * expected, "a sum is too far off");
}

// One bucket through pack and apply, for tensors of type T on a wire of type Wire.
template <typename T, typename Wire>
void run_bucket() {
  using W = std::conditional_t<std::is_same_v<Wire, double>, double, float>;
  constexpr bool kSame = std::is_same_v<T, Wire>, kCopies = std::is_same_v<T, uint8_t>;
  constexpr auto kType = c10::CppTypeToScalarType<T>::value, kWire = c10::CppTypeToScalarType<Wire>::value;
  constexpr auto kSize = static_cast<int64_t>(sizeof(T));
  const Content content = kCopies ? Content::kBytes : static_cast<Content>(below(kSame ? 4 : 3));
  const int64_t divisors[] = {1, 2, 3, 7};
  const int64_t divisor = content == Content::kBytes ? 1 : divisors[below(4)];
  // Slow on fibers.
  const bool measure = content != Content::kBytes && below(on_cuda ? 6 : 2) == 0;

  std::vector<std::unique_ptr<Memory>> tensors;
  std::vector<Segment> segments;
  std::vector<char> original;
  int64_t numel = 0, drift_numel = 0;
  const int64_t count = below(30) == 0 ? below(200) : below(7), parameters = below(count + 1);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t n = count > 7 ? 1 + below(30) : draw_numel(sizeof(T));
    const int64_t past = below(32 / kSize) * kSize + (fault == Fault::kOdd);
    tensors.push_back(std::make_unique<Memory>((n - (fault == Fault::kShort)) * kSize, past));
    fill<T>(tensors.back()->data(), tensors.back()->bytes() / kSize, content, 1);
    original.insert(original.end(), tensors.back()->data(), tensors.back()->data() + tensors.back()->bytes());
    segments.push_back({tensors.back()->data(), numel, n});
    numel += n;
    if (i < parameters) drift_numel = numel;
  }
  segments.shrink_to_fit();
  const Bucket bucket{segments.data(), count, numel, drift_numel};
  const Memory staging(numel * sizeof(Wire), below(32 / sizeof(Wire)) * sizeof(Wire));
  const auto address = [](const char* data) { return reinterpret_cast<uintptr_t>(data); };

  std::vector<char> bytes;
  cuda::DeviceTable table{};
  std::map<uintptr_t, uintptr_t> readable;
  if (on_cuda) {
    cuda_on_cpu::machine.seed = rng();
    bytes = cuda::build_table(bucket, sizeof(T));
    bytes.shrink_to_fit();
    table = cuda::table_at(bytes.data(), bytes.size());
    for (const Segment& segment : segments) readable[address(segment.data)] = address(segment.data + segment.numel * kSize);
    cuda_on_cpu::machine.readable = readable;
    cuda::pack(table, kType, kWire, staging.data(), nullptr);
  } else {
    at::set_num_threads(static_cast<int>(1 + below(3)));
    cpu::pack(bucket, kType, kWire, staging.data());
  }
  std::vector<char> expected(numel * sizeof(Wire));
  for (int64_t i = 0; i < numel; ++i) {
    if constexpr (kSame) put(expected.data(), i, at<T>(original.data(), i));
    if constexpr (!kSame) put(expected.data(), i, static_cast<Wire>(at<T>(original.data(), i)));
  }
  check(std::equal(expected.begin(), expected.end(), staging.data()), "pack differs from the plain loop");

  // What the collective leaves; the means are integers if all else is.
  fill<Wire>(staging.data(), numel, content, divisor);
  std::copy_n(staging.data(), expected.size(), expected.begin());
  Sums sums;
  if (on_cuda) {
    std::vector<double> scratch(cuda::partials_numel(table), NAN), totals{3.0, 5.0};
    cuda_on_cpu::machine.readable = {{address(staging.data()), address(staging.data() + staging.bytes())}};
    cuda::apply(table, kType, kWire, staging.data(), divisor, measure ? totals.data() : nullptr, measure ? scratch.data() : nullptr,
                nullptr);
    sums = {totals[0] - 3.0, totals[1] - 5.0};
  } else {
    at::set_num_threads(static_cast<int>(1 + below(3)));
    sums = cpu::apply(bucket, kType, kWire, staging.data(), divisor, measure);
  }
  check(std::equal(expected.begin(), expected.end(), staging.data()), "apply has changed the staging buffer");
  Sums plain;
  for (const Segment& segment : segments) {
    std::vector<char> result(segment.numel * kSize);
    for (int64_t i = 0; i < segment.numel; ++i) {
      const int64_t place = segment.offset + i;
      const Wire sum = at<Wire>(expected.data(), place);
      if constexpr (kCopies) {
        put(result.data(), i, sum);
      } else if (content == Content::kBytes) {
        put(result.data(), i, sum);
      } else {
        const W average = static_cast<W>(static_cast<Wire>(static_cast<W>(sum) / static_cast<W>(divisor)));
        const W difference = static_cast<W>(at<T>(original.data(), place)) - average;
        put(result.data(), i, static_cast<T>(average));
        if (!measure || place >= drift_numel) continue;
        plain.distance_sq += static_cast<double>(difference) * static_cast<double>(difference);
        plain.mean_sq += static_cast<double>(average) * static_cast<double>(average);
      }
    }
    check(std::equal(result.begin(), result.end(), segment.data), "apply differs from the plain loop");
  }
  check_sum(sums.distance_sq, plain.distance_sq, content);
  check_sum(sums.mean_sq, plain.mean_sq, content);
  for (const auto& tensor : tensors) tensor->check_guard();
  staging.check_guard();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) return 2;
  on_cuda = std::string(argv[1]) == "cuda";
  const std::string wrong = argc > 4 ? argv[4] : "";
  fault = wrong == "short" ? Fault::kShort : wrong == "odd" ? Fault::kOdd : Fault::kNone;
  void (*const kinds[])() = {run_bucket<c10::Half, float>,
                             run_bucket<c10::BFloat16, float>,
                             run_bucket<float, float>,
                             run_bucket<double, double>,
                             run_bucket<c10::Half, c10::Half>,
                             run_bucket<uint8_t, uint8_t>,
                             run_bucket<c10::BFloat16, c10::BFloat16>};
  const uint64_t seed = std::stoull(argv[2]), count = std::stoull(argv[3]);
  for (uint64_t i = seed; i < seed + count; ++i) {
    try {
      rng.seed(i);
      kinds[i % std::size(kinds)]();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s; run again with: %s %llu 1\n", error.what(), argv[1], static_cast<unsigned long long>(i));
      return 1;
    }
  }
  std::printf("%llu buckets\n", static_cast<unsigned long long>(count));
}
