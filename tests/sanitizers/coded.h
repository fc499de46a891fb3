// Test only: the three passes of a bucket of codes, each on random input, against a plain loop.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <type_traits>
#include <vector>

#include "../../csrc/cuda/coded.cuh"
#include "random.h"

// Equal bits, or NaN in both.
template <typename T>
void check_same(const char* got, const char* expected, int64_t numel, const char* what) {
  if (std::equal(got, got + numel * sizeof(T), expected)) return;
  for (int64_t i = 0; i < numel; ++i) {
    const T a = get<T>(got, i), b = get<T>(expected, i);
    check(std::memcmp(&a, &b, sizeof(T)) == 0 || (a != a && b != b), what);
  }
}

// A block as the plain loop sees it.
template <Code kCode, typename W>
struct PlainBlock {
  using Stored = typename Coding<kCode>::Stored;
  static constexpr bool kScaled = Coding<kCode>::kScaled, kNibbles = kCode == Code::kInt4;
  W values[kBlock];
  Stored codes[kBlock];
  float scale = 1.0f;

  // Values to codes; the values become what that drops.
  void encode() {
    uint32_t largest = 0;
    for (const W value : values) largest = std::max(largest, magnitude(static_cast<float>(value)));
    if constexpr (kScaled) scale = scale_of<kCode>(largest);
    for (int64_t i = 0; i < kBlock; ++i) {
      const auto value = static_cast<ValueOf<kCode>>(values[i]);
      codes[i] = to_code<kCode>(!kScaled ? value : inverse_of(scale) > 0.0f ? value * inverse_of(scale) : 0.0f);
      values[i] = dropped(values[i], from_code<kCode>(codes[i], scale));
    }
  }
  void write(char* chunk, const Chunks& chunks, int64_t block) const {
    char* to = chunk + codes_at<kCode>(block);
    for (int64_t i = 0; i < kBlock; ++i) {
      if constexpr (!kNibbles) put(to, i, codes[i]);
      if constexpr (kNibbles) to[i % 128] = static_cast<char>(two_codes(codes[i % 128], codes[i % 128 + 128]));
    }
    if (kScaled) put(chunk + scale_at<kCode>(block, chunks.blocks), 0, static_cast<c10::BFloat16>(scale));
  }
  void read(const char* chunk, const Chunks& chunks, int64_t block) {
    const char* from = chunk + codes_at<kCode>(block);
    for (int64_t i = 0; i < kBlock; ++i) {
      if constexpr (!kNibbles) codes[i] = get<Stored>(from, i);
      if constexpr (kNibbles) codes[i] = i < 128 ? low_code(from[i]) : high_code(from[i - 128]);
    }
    if (kScaled) scale = static_cast<float>(get<c10::BFloat16>(chunk + scale_at<kCode>(block, chunks.blocks), 0));
  }
  void mean_of(const char* chunk, int64_t stride, int64_t parts, int64_t divisor, const Chunks& chunks, int64_t block) {
    for (int64_t part = 0; part < parts; ++part) {
      read(chunk + part * stride, chunks, block);
      for (int64_t i = 0; i < kBlock; ++i) {
        const auto value = static_cast<W>(from_code<kCode>(codes[i], scale));
        values[i] = parts == 1 ? value : part == 0 ? W(0) + value : values[i] + value;
      }
    }
    for (W& value : values) value /= static_cast<W>(divisor);
  }
};

// Compares `count` chunks. What lies behind the scales is nobody's, and stays as it was.
template <Code kCode>
void check_chunks(const char* got, const char* expected, int64_t count, const Chunks& chunks) {
  using Stored = std::conditional_t<kCode == Code::kInt4, int8_t, typename Coding<kCode>::Stored>;
  const int64_t scales = scale_at<kCode>(0, chunks.blocks), end = Coding<kCode>::kScaled ? scales + 2 * chunks.blocks : scales;
  for (int64_t i = 0; i < count; ++i, got += chunks.nbytes, expected += chunks.nbytes) {
    check_same<Stored>(got, expected, scales / static_cast<int64_t>(sizeof(Stored)), "codes differ from the plain loop");
    check_same<c10::BFloat16>(got + scales, expected + scales, (end - scales) / 2, "scales differ from the plain loop");
    check(std::equal(got + end, got + chunks.nbytes, expected + end), "a write behind a chunk");
  }
}

// Chunks that ranks may have sent.
template <Code kCode>
void fill_chunks(char* data, int64_t count, const Chunks& chunks, Content content) {
  using Stored = typename Coding<kCode>::Stored;
  const auto codes = static_cast<int64_t>(scale_at<kCode>(0, chunks.blocks));
  for (int64_t i = 0; i < count; ++i, data += chunks.nbytes) {
    for (int64_t j = 0; j < chunks.nbytes; ++j) data[j] = static_cast<char>(rng() & 0xff);
    if constexpr (!std::is_same_v<Stored, int8_t>) fill<Stored>(data, codes / sizeof(Stored), content, 1);
    for (int64_t j = 0; Coding<kCode>::kScaled && j < chunks.blocks; ++j) {
      const float scales[] = {0.0f, 1.0f, 0x1p-126f, NAN, 0.0078125f};
      put(data + codes, j, static_cast<c10::BFloat16>(content == Content::kSpecial ? scales[below(5)] : 0x1p-8f));
    }
  }
}

// Mean, and SGD without a momentum, with one, and with Nesterov's; or the gradient for another optimizer.
inline Outer draw_outer() {
  const double lr = below(2) == 0 ? 1.0 : 0.7;
  const Outer outers[] = {{OuterKind::kMean, 1.0, 0.0, false},
                          {OuterKind::kSGD, lr, 0.0, false},
                          {OuterKind::kSGD, lr, 0.9, false},
                          {OuterKind::kSGD, lr, 0.9, true},
                          {OuterKind::kGradient, 1.0, 0.0, false}};
  return outers[below(std::size(outers))];
}

// Moves anchor and momentum of one element.
template <typename W>
void plain_step(const Outer& outer, W d, W& a, W& m) {
  const auto lr = static_cast<W>(outer.lr), momentum = static_cast<W>(outer.momentum);
  switch (outer.kind) {
    case OuterKind::kMean:
      a = a + d;
      return;
    case OuterKind::kGradient:
      m = -d;
      return;
    case OuterKind::kSGD:
      W step = d;
      if (momentum != 0) {
        m = momentum * m + d;
        step = outer.nesterov ? momentum * m + d : m;
      }
      a = a + lr * step;
  }
}

// One bucket of tensors of type T in code kCode.
template <typename T, Code kCode>
void run_coded() {
  using W = typename Wide<T>::type;
  using Block = PlainBlock<kCode, W>;
  constexpr auto kType = c10::CppTypeToScalarType<T>::value;
  constexpr auto kWide = static_cast<int64_t>(sizeof(W));
  const auto content = below(2) == 0 ? Content::kNormal : Content::kSpecial;
  const bool measure = below(on_cuda ? 6 : 2) == 0;
  const Tensors<T> tensors(content);
  const Bucket bucket = tensors.bucket();
  if (bucket.numel == 0) return;  // no such bucket is made
  constexpr bool kLossless = std::is_same_v<typename Coding<kCode>::Stored, W>;
  const bool summed = kLossless && fault == Fault::kNone && below(2) == 0;
  const int64_t size = 2 + below(3), count = size == 2 || summed ? 1 : size, divisor = 1 + below(size);
  const int64_t filled = (bucket.numel + kBlock - 1) / kBlock, blocks = (filled + count - 1) / count;
  const int64_t block_bytes = Coding<kCode>::kBlockBytes + (Coding<kCode>::kScaled ? 2 : 0);
  const Chunks chunks{kCode, blocks, (blocks * block_bytes + 15) / 16 * 16};

  const auto state = [&](int64_t numel) {
    auto memory = std::make_unique<const Memory>(numel * kWide, below(4) * kWide);
    fill<W>(memory->data(), numel, content, 1);
    return memory;
  };
  const Outer outer = draw_outer();
  // A rank that does not contribute may still owe. A fault is in the tensors.
  const bool contributes = fault != Fault::kNone || below(4) != 0, keeps = !summed && below(4) != 0;
  const bool moves = outer.kind == OuterKind::kGradient || outer.momentum != 0;
  const auto anchor = state(bucket.numel), residual = state(bucket.numel), momentum = state(bucket.numel);
  void* const kept = keeps ? residual->data() : nullptr;
  void* const moving = moves ? momentum->data() : nullptr;
  const Memory mine(count * chunks.nbytes, 16 * below(2)), received(size * chunks.nbytes, 16 * below(2));
  std::vector<char> bytes;
  cuda::CodedTable table{};
  if (on_cuda) {
    cuda_on_cpu::machine.seed = rng();
    bytes = cuda::build_coded_table(bucket);
    bytes.shrink_to_fit();
    table = cuda::coded_table_at(bytes.data(), bucket);
  }
  const auto threads = [] { at::set_num_threads(static_cast<int>(1 + below(3))); };
  const auto copy_of = [](const Memory& memory) { return std::vector<char>(memory.data(), memory.data() + memory.bytes()); };

  std::vector<char> codes = copy_of(mine), rest = copy_of(*residual), moved = copy_of(*anchor), speed = copy_of(*momentum);
  const auto begun_at = [&](int64_t i) { return static_cast<W>(static_cast<T>(get<W>(moved.data(), i))); };
  const auto many = static_cast<W>(divisor), share = W(1) / many;
  for (int64_t number = 0; number < count * blocks; ++number) {
    Block block{};
    for (int64_t i = 0, j = number * kBlock; i < kBlock && j < bucket.numel; ++i, ++j) {
      if (fault != Fault::kNone) break;  // not so many bytes are known
      if (contributes) block.values[i] = static_cast<W>(get<T>(tensors.original.data(), j)) - (summed ? W(0) : begun_at(j));
      if (keeps) block.values[i] = block.values[i] + many * get<W>(rest.data(), j);
    }
    block.encode();
    block.write(codes.data() + number / blocks * chunks.nbytes, chunks, number % blocks);
    for (int64_t i = 0, j = number * kBlock; keeps && i < kBlock && j < bucket.numel; ++i, ++j) {
      put(rest.data(), j, block.values[i] * share);
    }
  }
  // Nobody looks at the tensors of a rank that does not contribute.
  for (const Segment& segment : tensors.segments) {
    if (!contributes) ASAN_POISON_MEMORY_REGION(segment.data, segment.numel * sizeof(T));
  }
  const void* from = summed ? nullptr : anchor->data();
  if (summed && !contributes) {
    std::fill_n(mine.data(), mine.bytes(), 0);
  } else if (on_cuda) {
    cuda::encode(table, kType, chunks, count, contributes, divisor, from, kept, mine.data(), nullptr);
  } else {
    threads();
    cpu::encode(bucket, kType, chunks, count, contributes, divisor, from, kept, mine.data());
  }
  for (const Segment& segment : tensors.segments) {
    if (!contributes) ASAN_UNPOISON_MEMORY_REGION(segment.data, segment.numel * sizeof(T));
  }
  // Behind the last value to be summed there may be anything.
  if (summed) std::copy(mine.data() + bucket.numel * kWide, mine.data() + mine.bytes(), codes.begin() + bucket.numel * kWide);
  check_chunks<kCode>(mine.data(), codes.data(), count, chunks);
  check_same<W>(residual->data(), rest.data(), bucket.numel, "the residual after encode differs from the plain loop");

  fill_chunks<kCode>(received.data(), size, chunks, content);
  const std::vector<char> sent = copy_of(received);
  if (count > 1) {
    const int64_t begin = std::min(below(size) * blocks * kBlock, bucket.numel);
    const int64_t own = std::min(blocks * kBlock, bucket.numel - begin);
    for (int64_t number = 0; number < blocks; ++number) {
      Block block{};
      block.mean_of(sent.data(), chunks.nbytes, size, divisor, chunks, number);
      block.encode();
      block.write(codes.data(), chunks, number);
      for (int64_t i = 0, j = number * kBlock; keeps && i < kBlock && j < own; ++i, ++j) {
        put(rest.data(), begin + j, get<W>(rest.data(), begin + j) + block.values[i]);
      }
    }
    void* const part = keeps ? residual->data() + begin * kWide : nullptr;
    if (on_cuda) {
      cuda_on_cpu::machine.readable = received.readable();
      cuda::reduce(kType, chunks, size, received.data(), divisor, part, own, mine.data(), nullptr);
    } else {
      threads();
      cpu::reduce(kType, chunks, size, received.data(), divisor, part, own, mine.data());
    }
    check_chunks<kCode>(mine.data(), codes.data(), count, chunks);
    check_same<W>(residual->data(), rest.data(), bucket.numel, "the residual after reduce differs from the plain loop");
  }

  const int64_t parts = count == 1 && !summed ? size : 1, by = count == 1 ? divisor : 1;
  const bool lands = outer.kind != OuterKind::kGradient;
  std::vector<char> landed = tensors.original;
  landed.resize(bucket.numel * sizeof(T));
  Sums sums, plain;
  for (int64_t number = 0; number < filled; ++number) {
    Block block{};
    block.mean_of(sent.data() + number / blocks * chunks.nbytes, count * chunks.nbytes, parts, by, chunks, number % blocks);
    for (int64_t i = 0, j = number * kBlock; i < kBlock && j < bucket.numel; ++i, ++j) {
      const W begun = begun_at(j), d = summed ? block.values[i] - begun : block.values[i];
      const W mean = summed ? block.values[i] : begun + d;
      W a = get<W>(moved.data(), j), m = get<W>(speed.data(), j);
      plain_step(outer, d, a, m);
      put(moved.data(), j, a);
      put(speed.data(), j, m);
      if (measure && j < bucket.drift_numel) {
        const W difference = static_cast<W>(get<T>(landed.data(), j)) - mean;
        plain.distance_sq += static_cast<double>(difference) * static_cast<double>(difference);
        plain.mean_sq += static_cast<double>(mean) * static_cast<double>(mean);
      }
      if (lands) put(landed.data(), j, static_cast<T>(a));
    }
  }
  const Received all{received.data(), count, parts, by, summed};
  if (on_cuda) {
    std::vector<double> scratch(cuda::partials_numel(table), NAN), totals{3.0, 5.0};
    cuda_on_cpu::machine.readable = received.readable();
    cuda::land(table, kType, chunks, all, outer, anchor->data(), moving, measure ? totals.data() : nullptr,
               measure ? scratch.data() : nullptr, nullptr);
    sums = {totals[0] - 3.0, totals[1] - 5.0};
  } else {
    threads();
    sums = cpu::land(bucket, kType, chunks, all, outer, anchor->data(), moving, measure);
  }
  check_same<W>(anchor->data(), moved.data(), bucket.numel, "the anchor differs from the plain loop");
  check_same<W>(momentum->data(), speed.data(), bucket.numel, "the momentum differs from the plain loop");
  for (const Segment& segment : tensors.segments) {
    check_same<T>(segment.data, landed.data() + segment.offset * sizeof(T), segment.numel, "a tensor differs from the plain loop");
  }
  if (measure) {
    check_sum(sums.distance_sq, plain.distance_sq, content);
    check_sum(sums.mean_sq, plain.mean_sq, content);
  }
  check(sent == copy_of(received), "what was received has changed");
  tensors.check_guards();
  for (const Memory* memory : {anchor.get(), residual.get(), momentum.get(), &mine, &received}) memory->check_guard();
}

template <typename T>
void add_codes(std::vector<void (*)()>& kinds) {
  if constexpr (std::is_same_v<T, double>) kinds.push_back(run_coded<T, Code::kFloat64>);
  kinds.insert(kinds.end(), {run_coded<T, Code::kFloat32>, run_coded<T, Code::kBFloat16>, run_coded<T, Code::kFloat16>,
                             run_coded<T, Code::kInt8>, run_coded<T, Code::kInt4>});
}

inline std::vector<void (*)()> coded_kinds() {
  std::vector<void (*)()> kinds;
  add_codes<float>(kinds);
  add_codes<double>(kinds);
  add_codes<c10::Half>(kinds);
  add_codes<c10::BFloat16>(kinds);
  return kinds;
}
