// The entry points that move a bucket's tensors into and out of its staging buffer. One implementation per device.
#pragma once

#include <c10/core/ScalarType.h>

#include "elementwise.h"
#include "layout.h"

namespace localsgd {

// Consecutive chunks of codes, each of `blocks` blocks and `nbytes` bytes: all codes, then, if the code has them, all scales
// (bfloat16). A part is one or more such chunks; `parts` of them follow each other.
struct Chunks {
  Code code;
  int64_t blocks;
  int64_t nbytes;
};

// What has been received: `parts` parts of `count` chunks each. Their sum divided by `divisor` is the mean progress; a single part
// is taken as it is. Or, with `values`, one part of one chunk, in which lossless codes of the ranks' values are summed up already:
// divided by `divisor` that is where the mean progress leads to from the anchor, as it fits in the tensor.
struct Received {
  const char* codes;
  int64_t count;
  int64_t parts;
  int64_t divisor;
  bool values;
};

// Of one chunk: where block number `block` has its codes and its scale.
template <Code kCode>
LOCALSGD_HD int64_t codes_at(int64_t block) {
  return block * Coding<kCode>::kBlockBytes;
}
template <Code kCode>
LOCALSGD_HD int64_t scale_at(int64_t block, int64_t blocks) {
  return blocks * Coding<kCode>::kBlockBytes + block * static_cast<int64_t>(sizeof(c10::BFloat16));
}

}  // namespace localsgd

namespace localsgd::cpu {

// Copies the tensors (of type `dtype`) into `staging` (of type `wire`), rounding once.
void pack(const Bucket& bucket, c10::ScalarType dtype, c10::ScalarType wire, void* staging);

// Divides `staging` by `divisor`, rounds to `wire`, and copies it back to the tensors, rounding once to `dtype`. With `measure`
// also gives the sums over the bucket's parameters, in an order that does not depend on the number of threads.
Sums apply(const Bucket& bucket, c10::ScalarType dtype, c10::ScalarType wire, const void* staging, int64_t divisor, bool measure);

// The three passes of a bucket of codes. `anchor`, `residual` and `momentum` hold one double for each element of double tensors,
// else one float. Without a residual what is dropped is lost, and without a momentum there is none.

// Encodes (tensor - anchor, as it fits in the tensor) + divisor * residual into as many chunks as the bucket fills, `count` of
// them, zeros behind its end; the residual becomes what that drops, divided by `divisor`. Without `contributes` the tensors count
// as equal to the anchor, and are not looked at. Without an anchor, in a lossless code and one chunk, encodes the tensors' values,
// and behind their end whatever.
void encode(const Bucket& bucket, c10::ScalarType dtype, const Chunks& chunks, int64_t count, bool contributes, int64_t divisor,
            const void* anchor, void* residual, char* codes);

// Encodes the mean, sum over `parts` chunks (in their order) divided by `divisor`, into one chunk. Adds what that drops to the
// residual of the `numel` elements of the bucket that the chunk stands for; it may stand for less than it holds.
void reduce(c10::ScalarType dtype, const Chunks& chunks, int64_t parts, const char* received, int64_t divisor, void* residual,
            int64_t numel, char* codes);

// Moves the anchor as `outer` says for that progress, and copies it to the tensors, rounding once. With kGradient writes minus the
// progress to `momentum` instead. Gives what `apply` does.
Sums land(const Bucket& bucket, c10::ScalarType dtype, const Chunks& chunks, const Received& received, const Outer& outer,
          void* anchor, void* momentum, bool measure);

}  // namespace localsgd::cpu
