#include "pipeline.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <deque>
#include <mutex>
#include <utility>

#include "kernels.h"
#ifdef LOCALSGD_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "cuda/kernels.cuh"
#endif

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
  if (buffer_.is_cpu()) return;
#ifdef LOCALSGD_CUDA
  TORCH_CHECK(buffer_.is_cuda(), "localsgd_ext: no kernels for ", buffer_.device());
  const c10::cuda::CUDAGuard guard(buffer_.device());
  std::vector<char> table = cuda::build_table(bucket(), c10::elementSize(dtype_));
  const auto bytes = static_cast<int64_t>(table.size());
  table_ = at::empty({bytes}, buffer_.options().dtype(at::kByte));
  table_.copy_(at::from_blob(table.data(), {bytes}, at::kByte));
  partials_ =
      at::empty({cuda::partials_numel(cuda::table_at(table_.data_ptr(), table.size()))}, buffer_.options().dtype(at::kDouble));
#else
  TORCH_CHECK(false, "localsgd_ext: this build has no kernels for ", buffer_.device());
#endif
}

Bucket BoundBucket::bucket() const {
  return {segments_.data(), static_cast<int64_t>(segments_.size()), buffer_.numel(), drift_numel_};
}

at::Tensor BoundBucket::new_sums() const { return at::zeros({2}, buffer_.options().dtype(at::kDouble)); }

void BoundBucket::pack() {
#ifdef LOCALSGD_CUDA
  if (buffer_.is_cuda()) {
    const c10::cuda::CUDAGuard guard(buffer_.device());
    return cuda::pack(cuda::table_at(table_.data_ptr(), table_.numel()), dtype_, buffer_.scalar_type(), buffer_.data_ptr(),
                      c10::cuda::getCurrentCUDAStream());
  }
#endif
  cpu::pack(bucket(), dtype_, buffer_.scalar_type(), buffer_.data_ptr());
}

void BoundBucket::apply(int64_t divisor, const at::Tensor& sums) {
  const bool measure = drift_numel_ > 0;
  double* into = sums.data_ptr<double>();
#ifdef LOCALSGD_CUDA
  if (buffer_.is_cuda()) {
    const c10::cuda::CUDAGuard guard(buffer_.device());
    return cuda::apply(cuda::table_at(table_.data_ptr(), table_.numel()), dtype_, buffer_.scalar_type(), buffer_.data_ptr(),
                       divisor, measure ? into : nullptr, partials_.data_ptr<double>(), c10::cuda::getCurrentCUDAStream());
  }
#endif
  const Sums own = cpu::apply(bucket(), dtype_, buffer_.scalar_type(), buffer_.data_ptr(), divisor, measure);
  into[0] += own.distance_sq;
  into[1] += own.mean_sq;
}

namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

WorkPtr send(const BoundBucket& bucket, const c10::intrusive_ptr<c10d::ProcessGroup>& group, const Terms& terms) {
  std::vector<at::Tensor> tensors{bucket.buffer()};
  if (bucket.follow()) {
    c10d::BroadcastOptions options;
    options.rootRank = terms.root;
    if (terms.timeout.count() > 0) options.timeout = terms.timeout;
    return group->broadcast(tensors, options);
  }
  c10d::AllreduceOptions options;
  if (terms.timeout.count() > 0) options.timeout = terms.timeout;
  return group->allreduce(tensors, options);
}

void wait(c10d::Work& work, const Terms& terms) {
  if (!terms.watch) {
    work.wait();
    return;
  }
  while (true) {
    const auto begun = std::chrono::steady_clock::now();
    try {
      work.wait(terms.poll);
      return;
    } catch (...) {
      // Only the waiting has timed out, unless it took less time than that.
      if (std::chrono::steady_clock::now() - begun < terms.poll) throw;
    }
    if (work.isCompleted()) {
      work.wait();
      return;
    }
    terms.watch();
  }
}

// Gloo's threads let go of a collective a moment after its end. Were theirs the last reference, they would need Python's lock to
// free the tensor in it, which aborts a process that is just exiting (pytorch#190489).
void keep(const WorkPtr& work) {
  static std::mutex mutex;
  static auto* const kept = new std::deque<WorkPtr>;
  const std::lock_guard<std::mutex> lock(mutex);
  kept->push_back(work);
  if (kept->size() > 8) kept->pop_front();
}

// Collectives that may never end go on writing to their buffers, so these are never freed.
void abandon(const WorkPtr& work) {
  static std::mutex mutex;
  static auto* const abandoned = new std::vector<WorkPtr>;
  const std::lock_guard<std::mutex> lock(mutex);
  abandoned->push_back(work);
}

}  // namespace

at::Tensor average(const std::vector<BoundBucket*>& buckets, int64_t slots, const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                   const Terms& terms) {
  std::deque<std::pair<BoundBucket*, WorkPtr>> flying;
  std::vector<at::Tensor> sums;  // one for each device
  const auto sums_of = [&](const BoundBucket& bucket) -> const at::Tensor& {
    for (const at::Tensor& each : sums) {
      if (each.device() == bucket.buffer().device()) return each;
    }
    return sums.emplace_back(bucket.new_sums());
  };
  const auto land = [&] {
    const auto [bucket, work] = flying.front();
    wait(*work, terms);
    if (bucket->buffer().is_cpu()) keep(work);
    flying.pop_front();
    if (!bucket->follow()) {
      bucket->apply(terms.divisor, sums_of(*bucket));
    } else if (group->getRank() != terms.root) {
      bucket->apply(1, sums_of(*bucket));
    }
  };
  try {
    for (BoundBucket* bucket : buckets) {
      // The staging buffer that this bucket is about to use is free once the bucket `slots` before it has been copied back.
      if (static_cast<int64_t>(flying.size()) == slots) land();
      if (terms.contributes || bucket->follow()) {
        bucket->pack();
      } else {
        bucket->buffer().zero_();
      }
      flying.emplace_back(bucket, send(*bucket, group, terms));
    }
    while (!flying.empty()) land();
  } catch (...) {
    for (const auto& [bucket, work] : flying) abandon(work);
    throw;
  }
  if (sums.empty()) return at::zeros({2}, at::kDouble);
  for (size_t i = 1; i < sums.size(); ++i) sums[0].add_(sums[i].to(sums[0].device()));
  return sums[0];
}

}  // namespace localsgd
