// Implementation of Horovod's cuda_kernels.cu with the CUDA runtime only, because the wheel is compiled
// without nvcc. Each copy is one call of the runtime. Scaling is not implemented, because sums need no
// factor, and NCCL computes averages.

#include "cuda_kernels.h"

#include <stdexcept>
#include <string>

namespace horovod {
namespace common {

void BatchedD2DMemcpyCudaImpl(BatchedD2DParams& params, int num_copies, cudaStream_t stream) {
  for (int i = 0; i < num_copies; ++i) {
    cudaError_t result = cudaMemcpyAsync(params.out[i], params.in[i], params.sizes[i],
                                         cudaMemcpyDeviceToDevice, stream);
    if (result != cudaSuccess) {
      throw std::logic_error(std::string("A copy on the GPU failed: ") +
                             cudaGetErrorString(result));
    }
  }
}

void ScaleBufferCudaImpl(const void*, void*, const int64_t, double factor, DataType,
                         cudaStream_t) {
  throw std::logic_error("This build of Horovod cannot scale tensors on GPUs (factor " +
                         std::to_string(factor) +
                         "). Multiply before or after the collective, or use op=Average.");
}

void BatchedScaledD2DMemcpyCudaImpl(BatchedD2DParams&, int, double factor, DataType type,
                                    cudaStream_t stream) {
  ScaleBufferCudaImpl(nullptr, nullptr, 0, factor, type, stream);
}

}  // namespace common
}  // namespace horovod
