// The entry points that move a bucket's tensors into and out of its staging buffer. One implementation per device.
#pragma once

#include <c10/core/ScalarType.h>

#include "layout.h"

namespace localsgd::cpu {

// Copies the tensors (of type `dtype`) into `staging` (of type `wire`), rounding once.
void pack(const Bucket& bucket, c10::ScalarType dtype, c10::ScalarType wire, void* staging);

// Divides `staging` by `divisor`, rounds to `wire`, and copies it back to the tensors, rounding once to `dtype`. With `measure`
// also gives the sums over the bucket's parameters, in an order that does not depend on the number of threads.
Sums apply(const Bucket& bucket, c10::ScalarType dtype, c10::ScalarType wire, const void* staging, int64_t divisor, bool measure);

}  // namespace localsgd::cpu
