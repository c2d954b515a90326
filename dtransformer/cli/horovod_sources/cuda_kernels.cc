// What Horovod's cuda_kernels.cu does on a GPU, by CUDA's runtime alone, as there is no nvcc where
// the wheel is compiled. Copies are one call of the runtime each. Nothing here scales: sums need no
// factor, and NCCL averages by itself.

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
      throw std::logic_error(std::string("a copy on the GPU failed: ") +
                             cudaGetErrorString(result));
    }
  }
}

void ScaleBufferCudaImpl(const void*, void*, const int64_t, double factor, DataType,
                         cudaStream_t) {
  throw std::logic_error("this Horovod scales nothing on GPUs (a factor of " +
                         std::to_string(factor) + "): multiply before or after, or use op=Average");
}

void BatchedScaledD2DMemcpyCudaImpl(BatchedD2DParams&, int, double factor, DataType type,
                                    cudaStream_t stream) {
  ScaleBufferCudaImpl(nullptr, nullptr, 0, factor, type, stream);
}

}  // namespace common
}  // namespace horovod
