// A bucket whose differences to the anchor travel in codes; the same as backends/coded.py, call by call.
#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "exchange.h"
#include "kernels.h"

namespace localsgd {

// Anchor, residual or momentum of a bucket, which may live on another device than the one that computes with it; or none.
class StatePart {
 public:
  StatePart(std::optional<at::Tensor> home, std::optional<at::Tensor> here) : home_(std::move(home)), here_(std::move(here)) {}
  void* fetch() {
    if (!here_) return nullptr;
    if (!here_->is_same(*home_)) here_->copy_(*home_, /*non_blocking=*/true);
    return here_->data_ptr();
  }
  void store() {
    if (here_ && !here_->is_same(*home_)) home_->copy_(*here_, /*non_blocking=*/true);
  }
  const std::optional<at::Tensor>& here() const { return here_; }

 private:
  std::optional<at::Tensor> home_, here_;
};

class CodedBucket : public Exchange {
 public:
  // staging: the bytes of `count` chunks, twice; once where `summed`: then values travel, and an all-reduce sums them. state:
  // anchor, residual and momentum, of which only the anchor must be there; shape (numel,), double for double tensors, else float.
  CodedBucket(const std::vector<at::Tensor>& flats, const SegmentList& segments, at::Tensor staging, int64_t drift_numel,
              Chunks chunks, int64_t count, bool summed, std::vector<StatePart> state, Outer outer, int64_t rank, int64_t size);

  WorkPtr start(const GroupPtr& group, const Terms& terms) override;
  WorkPtr advance(const GroupPtr& group, const Terms& terms) override;
  void finish(const GroupPtr& group, const Terms& terms, const at::Tensor& sums) override;

 private:
  // On the bucket's device; see kernels.h.
  void encode(const Terms& terms);
  void reduce(int64_t divisor, void* residual, int64_t numel);
  void land(int64_t parts, int64_t divisor, double* sums);

  Chunks chunks_;
  int64_t count_;
  bool summed_;
  StatePart anchor_, residual_, momentum_;
  Outer outer_;
  int64_t rank_, size_;
  // Parts of the staging buffer: what this rank sends, what it receives from the others, and where all of that lies. Where values
  // are summed there is but one.
  at::Tensor mine_, theirs_, received_;
  at::Tensor sum_;       // as numbers
  at::Tensor table_;     // CUDA: the segments, on the device
  at::Tensor partials_;  // CUDA: scratch for the sums
};

}  // namespace localsgd
