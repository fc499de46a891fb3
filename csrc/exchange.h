// A bucket on its way through one averaging, whatever travels: what the pipeline sees of it.
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

using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// How this rank takes part in one averaging; see collectives.py.
struct Terms {
  bool contributes;
  int64_t divisor;
  int64_t root;
  std::function<void()> watch;
  std::chrono::milliseconds poll;
  std::chrono::milliseconds timeout;

  // Of one collective, with the timeout if there is one.
  template <typename Options>
  Options options() const {
    Options made;
    if (timeout.count() > 0) made.timeout = timeout;
    return made;
  }
};

// Where the elements of a bucket lie: (tensor, start, numel) in their order.
using SegmentList = std::vector<std::tuple<int64_t, int64_t, int64_t>>;

// The calls follow each other when the collective before has ended. Only `finish` writes to the tensors.
class Exchange {
 public:
  virtual ~Exchange() = default;

  // Packs, and starts the first collective.
  virtual WorkPtr start(const GroupPtr& group, const Terms& terms) = 0;
  // Starts the second collective, if there is one.
  virtual WorkPtr advance(const GroupPtr&, const Terms&) { return {}; }
  // Writes to the tensors. Adds ||local - mean||^2 and ||mean||^2 to `sums`, double, shape (2,), on the bucket's device.
  virtual void finish(const GroupPtr& group, const Terms& terms, const at::Tensor& sums) = 0;

  c10::Device device() const { return staging_.device(); }
  // What the collectives write to.
  const at::Tensor& staging() const { return staging_; }
  at::Tensor new_sums() const;

 protected:
  // flats: one-dimensional views of the tensors' memory, all of one type; they are kept alive. numel: elements in all segments
  // together.
  Exchange(const std::vector<at::Tensor>& flats, const SegmentList& segments, at::Tensor staging, int64_t numel,
           int64_t drift_numel);

  Bucket bucket() const { return {segments_.data(), static_cast<int64_t>(segments_.size()), numel_, drift_numel_}; }

  at::Tensor staging_;
  at::ScalarType dtype_;
  int64_t numel_;
  int64_t drift_numel_;

 private:
  std::vector<at::Tensor> flats_;
  std::vector<Segment> segments_;
};

}  // namespace localsgd
