// One averaging: buckets packed, sent and copied back in a pipeline of asynchronous collectives.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <tuple>
#include <vector>

#include "layout.h"

namespace localsgd {

// A bucket tied to memory, on whichever device that is. `flats` and `buffer` keep the memory alive.
class BoundBucket {
 public:
  // flats: one-dimensional views of the tensors' memory, all of one type. segments: (tensor, start, numel) in the order of the
  // bucket. buffer: what travels, shape (numel,). follow: take rank 0's bytes instead of the mean.
  BoundBucket(const std::vector<at::Tensor>& flats, const std::vector<std::tuple<int64_t, int64_t, int64_t>>& segments,
              at::Tensor buffer, int64_t drift_numel, bool follow);

  void pack();
  // Divides and copies back. Adds ||local - mean||^2 and ||mean||^2 to `sums`, double, shape (2,), on the bucket's device.
  void apply(int64_t divisor, const at::Tensor& sums);

  const at::Tensor& buffer() const { return buffer_; }
  bool follow() const { return follow_; }
  // Two zeros to pass to `apply`.
  at::Tensor new_sums() const;

 private:
  Bucket bucket() const;

  std::vector<at::Tensor> flats_;
  std::vector<Segment> segments_;
  at::Tensor buffer_;
  at::ScalarType dtype_;
  int64_t drift_numel_;
  bool follow_;
  at::Tensor table_;     // CUDA: the segments, on the device, so that an averaging copies nothing there
  at::Tensor partials_;  // CUDA: scratch for the sums
};

// How this rank takes part in one averaging; see collectives.py.
struct Terms {
  bool contributes;
  int64_t divisor;
  int64_t root;
  std::function<void()> watch;
  std::chrono::milliseconds poll;
  std::chrono::milliseconds timeout;
};

// Averages all buckets over the group, with at most `slots` of them in flight; bucket k has to use staging buffer k % slots. Gives
// the sums of `apply` over all of them. Throws what a collective or `watch` throws; every element then holds its local or its
// averaged value, but the staging buffers may still be written to.
at::Tensor average(const std::vector<BoundBucket*>& buckets, int64_t slots, const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                   const Terms& terms);

}  // namespace localsgd
