#include "pipeline.h"

#include <c10/util/Exception.h>

#include <deque>
#include <utility>

#include "kernels.h"

namespace localsgd {

BoundBucket::BoundBucket(const std::vector<at::Tensor>& flats, const std::vector<std::tuple<int64_t, int64_t, int64_t>>& segments,
                         at::Tensor buffer, int64_t drift_numel, bool follow)
    : buffer_(std::move(buffer)), dtype_(buffer_.scalar_type()), drift_numel_(drift_numel), follow_(follow) {
  segments_.reserve(segments.size());
  int64_t offset = 0;
  for (const auto& [index, start, numel] : segments) {
    const at::Tensor& flat = flats.at(index);
    TORCH_CHECK(flat.is_contiguous() && start >= 0 && start + numel <= flat.numel(), "localsgd_ext: segment outside its tensor");
    dtype_ = flat.scalar_type();
    segments_.push_back({static_cast<char*>(flat.data_ptr()) + start * flat.element_size(), offset, numel});
    flats_.push_back(flat);
    offset += numel;
  }
  TORCH_CHECK(offset == buffer_.numel() && buffer_.is_contiguous(), "localsgd_ext: segments do not fill their bucket");
}

Bucket BoundBucket::bucket() const {
  return {segments_.data(), static_cast<int64_t>(segments_.size()), buffer_.numel(), drift_numel_};
}

void BoundBucket::pack() { cpu::pack(bucket(), dtype_, buffer_.scalar_type(), buffer_.data_ptr()); }

void BoundBucket::apply(int64_t divisor, Sums& sums) {
  const Sums own = cpu::apply(bucket(), dtype_, buffer_.scalar_type(), buffer_.data_ptr(), divisor, drift_numel_ > 0);
  sums.distance_sq += own.distance_sq;
  sums.mean_sq += own.mean_sq;
}

namespace {

c10::intrusive_ptr<c10d::Work> send(const BoundBucket& bucket, const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  std::vector<at::Tensor> tensors{bucket.buffer()};
  if (bucket.follow()) {
    c10d::BroadcastOptions options;
    options.rootRank = 0;
    return group->broadcast(tensors, options);
  }
  return group->allreduce(tensors);
}

}  // namespace

Sums average(const std::vector<BoundBucket*>& buckets, int64_t slots, const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  std::deque<std::pair<BoundBucket*, c10::intrusive_ptr<c10d::Work>>> flying;
  Sums sums;
  const auto land = [&] {
    const auto [bucket, work] = flying.front();
    work->wait();
    flying.pop_front();
    if (!bucket->follow()) {
      bucket->apply(group->getSize(), sums);
    } else if (group->getRank() != 0) {
      bucket->apply(1, sums);
    }
  };
  try {
    for (BoundBucket* bucket : buckets) {
      // The staging buffer that this bucket is about to use is free once the bucket `slots` before it has been copied back.
      if (static_cast<int64_t>(flying.size()) == slots) land();
      bucket->pack();
      flying.emplace_back(bucket, send(*bucket, group));
    }
    while (!flying.empty()) land();
  } catch (...) {
    // Collectives still in flight write to the staging buffers: they must end before anyone uses these again.
    for (const auto& [bucket, work] : flying) {
      try {
        work->wait();
      } catch (...) {
      }
    }
    throw;
  }
  return sums;
}

}  // namespace localsgd
