// The one way to start a kernel. The tests replace it, since g++ knows no kernel launch.
#pragma once

#if defined(LOCALSGD_CUDA_ON_CPU)
#include "cuda_on_cpu.h"
#else

#include <c10/util/Exception.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <limits>

namespace localsgd::cuda {

// Queues `blocks` blocks of `threads` threads; does not wait. Throws what the launch itself reports.
template <typename... Params, typename... Args>
void launch(void (*kernel)(Params...), int64_t blocks, int threads, cudaStream_t stream, Args... args) {
  TORCH_CHECK(blocks <= std::numeric_limits<int32_t>::max(), "localsgd_ext: bucket too large for one launch");
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.stream = stream;
  const cudaError_t status = cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...);
  if (status != cudaSuccess) {
    static_cast<void>(cudaGetLastError());  // reported here: torch shall not report it again at its next launch
    TORCH_CHECK(false, "localsgd_ext: CUDA kernel launch failed: ", cudaGetErrorString(status));
  }
}

}  // namespace localsgd::cuda

#endif
