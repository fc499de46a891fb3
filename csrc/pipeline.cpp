#include "pipeline.h"

#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <deque>
#include <mutex>
#include <utility>

namespace localsgd {
namespace {

// As collectives.wait does it in Python: a collective whose peer is gone may never end, so who waits looks up now and then.
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
  constexpr size_t kKept = 8;  // more than end at the same moment; as in collectives.py
  static std::mutex mutex;
  static auto* const kept = new std::deque<WorkPtr>;
  const std::lock_guard<std::mutex> lock(mutex);
  kept->push_back(work);
  if (kept->size() > kKept) kept->pop_front();
}

// Collectives that may never end go on writing to their buffers, so these are never freed.
void abandon(const WorkPtr& work, const at::Tensor& staging) {
  static std::mutex mutex;
  static auto* const abandoned = new std::vector<std::pair<WorkPtr, at::Tensor>>;
  const std::lock_guard<std::mutex> lock(mutex);
  abandoned->emplace_back(work, staging);
}

struct Flying {
  Exchange* bucket;
  WorkPtr work;
  bool first;  // of the bucket's collectives
};

}  // namespace

at::Tensor average(const std::vector<Exchange*>& buckets, const GroupPtr& group, const Terms& terms) {
  std::deque<Flying> flying;
  std::vector<at::Tensor> sums;  // one for each device
  const auto sums_of = [&](const Exchange& bucket) -> const at::Tensor& {
    for (const at::Tensor& each : sums) {
      if (each.device() == bucket.device()) return each;
    }
    return sums.emplace_back(bucket.new_sums());
  };
  // Always the first, be it the last to end: all ranks have to start their second collectives in the same order.
  const auto land = [&] {
    const Flying landed = flying.front();
    {
      RECORD_USER_SCOPE("localsgd_ext::exchange");
      wait(*landed.work, terms);
    }
    if (landed.bucket->device().is_cpu()) keep(landed.work);
    flying.pop_front();
    RECORD_USER_SCOPE("localsgd_ext::apply");
    if (landed.first) {
      if (WorkPtr more = landed.bucket->advance(group, terms)) {
        flying.push_back({landed.bucket, std::move(more), false});
        return;
      }
    }
    landed.bucket->finish(group, terms, sums_of(*landed.bucket));
  };
  try {
    for (Exchange* bucket : buckets) {
      // Its staging buffer is free once the bucket that was in there has been copied back.
      const auto is_in_its_buffer = [&](const Flying& each) {
        return each.bucket->staging().data_ptr() == bucket->staging().data_ptr();
      };
      while (std::any_of(flying.begin(), flying.end(), is_in_its_buffer)) land();
      RECORD_USER_SCOPE("localsgd_ext::pack");
      flying.push_back({bucket, bucket->start(group, terms), true});
    }
    while (!flying.empty()) land();
  } catch (...) {
    for (const Flying& each : flying) abandon(each.work, each.bucket->staging());
    throw;
  }
  if (sums.empty()) return at::zeros({2}, at::kDouble);
  for (size_t i = 1; i < sums.size(); ++i) sums[0].add_(sums[i].to(sums[0].device()));
  return sums[0];
}

}  // namespace localsgd
