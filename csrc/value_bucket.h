// A bucket of values: summed by an all-reduce, or broadcast.
#pragma once

#include "exchange.h"

namespace localsgd {

class ValueBucket : public Exchange {
 public:
  // buffer: what travels, shape (numel,). follow: take one rank's bytes instead of the mean.
  ValueBucket(const std::vector<at::Tensor>& flats, const SegmentList& segments, at::Tensor buffer, int64_t drift_numel,
              bool follow);

  WorkPtr start(const GroupPtr& group, const Terms& terms) override;
  void finish(const GroupPtr& group, const Terms& terms, const at::Tensor& sums) override;

  void pack();
  // Divides and copies back; see `finish`.
  void apply(int64_t divisor, const at::Tensor& sums);

  bool follow() const { return follow_; }

 private:
  bool follow_;
  at::Tensor table_;     // CUDA: the segments, on the device, so that an averaging copies nothing there
  at::Tensor partials_;  // CUDA: scratch for the sums
};

}  // namespace localsgd
