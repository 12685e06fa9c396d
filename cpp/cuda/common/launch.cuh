// Helpers of the launchers.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "attention/problem.h"
#include "cuda/launch.h"

namespace jaxflash::cuda {

// The text of an error, which the runtime then forgets: it would be found after the next call too.
inline Error text_of(cudaError_t error) {
  if (error != cudaSuccess) cudaGetLastError();
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction) {
    return "jaxflash: no code for this GPU: the CUDA kernels need compute capability 8.0 or newer, "
           "and a build that includes it (`python -m jaxflash` lists what was built)";
  }
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

__host__ __device__ inline int64_t tiles_of(int64_t length, int64_t tile) {
  return (length + tile - 1) / tile;
}

// Deals out a workspace in aligned pieces. Without memory it only adds up sizes.
class Cursor {
 public:
  explicit Cursor(Workspace workspace) : workspace_(workspace) {}

  template <class T>
  T* take(int64_t count) {
    const size_t at = used_;
    used_ += (static_cast<size_t>(count) * sizeof(T) + 255) / 256 * 256;
    if (workspace_.data == nullptr) return nullptr;
    return reinterpret_cast<T*>(static_cast<char*>(workspace_.data) + at);
  }
  size_t used() const { return used_; }
  bool fits() const { return used_ <= workspace_.bytes; }

 private:
  Workspace workspace_;
  size_t used_ = 0;
};

// The architecture (as in __CUDA_ARCH__ / 10) that a kernel was compiled for and runs as on the
// current device. The first call for a kernel and device allows the kernel that much dynamic shared
// memory. `cache` is the kernel's own.
inline constexpr int kMaxDevices = 64;
struct KernelCache {
  std::atomic<int> arch[kMaxDevices] = {};
};

template <class Kernel, class SharedBytes>
Error prepare_kernel(Kernel kernel, KernelCache& cache, const SharedBytes& shared_bytes,
                     int& arch) {
  int device = 0;
  if (const Error error = text_of(cudaGetDevice(&device))) return error;
  std::atomic<int>& known = cache.arch[std::min(device, kMaxDevices - 1)];
  arch = device < kMaxDevices - 1 ? known.load(std::memory_order_acquire) : 0;
  if (arch != 0) return nullptr;
  cudaFuncAttributes attributes;
  if (const Error error = text_of(cudaFuncGetAttributes(&attributes, kernel))) return error;
  arch = attributes.ptxVersion;
  if (const Error error = text_of(cudaFuncSetAttribute(
          kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes(arch)))) {
    return error;
  }
  known.store(arch, std::memory_order_release);
  return nullptr;
}

// How many multiprocessors the current device has.
inline Error count_processors(int& processors) {
  int device = 0;
  if (const Error error = text_of(cudaGetDevice(&device))) return error;
  return text_of(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
}

// Whether rows of `columns` elements can be copied in aligned pieces of 16 bytes.
inline bool allows_vectors(const Tensor& tensor, int64_t columns, int64_t size) {
  int64_t strides = columns | tensor.head | tensor.row;
  for (int64_t batch : tensor.batch) strides |= batch;
  const bool near = tensor.row * size < (int64_t{1} << 26);  // 32 rows within 32 bits
  return near && strides * size % 16 == 0 && reinterpret_cast<uintptr_t>(tensor.data) % 16 == 0;
}

}  // namespace jaxflash::cuda
