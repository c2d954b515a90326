// Kernels of collectives on CPUs, between processes on one host.
//
// TensorFlow's own carry tensors between processes through gRPC, which copies each several times.
// The registry prefers these, which have a higher priority, as soon as this library is loaded.

#include <algorithm>
#include <cstring>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "exchange.h"
#include "tensorflow/core/framework/device_base.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/lib/core/threadpool.h"

namespace dtransformer {
namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::DEVICE_CPU;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

enum Kind { kAdd, kMultiply, kMinimum, kMaximum, kAllToAll, kGather };
constexpr int kMean = 16;  // added to kAdd

// A tensor and what its group, its operation and its turn are: the inputs of all these kernels.
class Collective : public AsyncOpKernel {
 public:
  using AsyncOpKernel::AsyncOpKernel;

 protected:
  void Send(OpKernelContext* context, DoneCallback done, int kind, Computation computation) {
    int group_size = scalar(context, 1);
    if (group_size < 2) {
      context->set_output(0, context->input(0));
      return done();
    }
    Key key{scalar(context, 2), scalar(context, 3), context->frame_iter().frame_id,
            context->frame_iter().iter_id};
    int device = context->device()->parsed_name().id;
    Call call{context, std::move(done), std::move(computation), kind, device};
    Exchange::Of(std::get<0>(key)).Send(std::move(call), key, group_size);
  }

  static int32_t scalar(OpKernelContext* context, int input) {
    return context->input(input).scalar<int32_t>()();
  }
};

// Reduces tensors tile by tile: what is between is in the nearest cache.
template <typename T, typename Merge>
absl::Status ReduceBy(Merge merge, const Call& call, const Round& round) {
  std::vector<const T*> all;
  for (auto& [device, one] : round.contributions) all.push_back(reinterpret_cast<const T*>(one.data));
  Tensor* output = nullptr;
  absl::Status status = call.context->forward_input_or_allocate_output(
      {0}, 0, call.context->input(0).shape(), &output);
  if (!status.ok()) return status;
  T* out = static_cast<T*>(output->data());
  const bool is_mean = call.kind & kMean;
  const T number = static_cast<T>(static_cast<int>(all.size()));
  auto reduce = [&](int64_t begin, int64_t end) {
    constexpr int64_t kTile = 2048;
    T tile[kTile];
    for (int64_t at = begin; at < end; at += kTile) {
      const int64_t size = std::min(kTile, end - at);
      for (int64_t i = 0; i < size; ++i) tile[i] = merge(all[0][at + i], all[1][at + i]);
      for (size_t device = 2; device < all.size(); ++device)
        for (int64_t i = 0; i < size; ++i) tile[i] = merge(tile[i], all[device][at + i]);
      if (is_mean)
        for (int64_t i = 0; i < size; ++i) tile[i] = tile[i] / number;
      memcpy(out + at, tile, size * sizeof(T));
    }
  };
  const int64_t cycles = 2 * all.size();  // of one element
  call.context->device()->tensorflow_cpu_worker_threads()->workers->ParallelFor(
      output->NumElements(), tsl::thread::ThreadPool::SchedulingParams::Adaptive(cycles), reduce);
  return absl::OkStatus();
}

template <typename T>
absl::Status Reduce(const Call& call, const Round& round) {
  switch (call.kind & ~kMean) {
    case kAdd:
      return ReduceBy<T>([](T a, T b) { return static_cast<T>(a + b); }, call, round);
    case kMultiply:
      return ReduceBy<T>([](T a, T b) { return static_cast<T>(a * b); }, call, round);
    case kMinimum:
      return ReduceBy<T>([](T a, T b) { return b < a ? b : a; }, call, round);
    default:
      return ReduceBy<T>([](T a, T b) { return a < b ? b : a; }, call, round);
  }
}

template <typename T>
class ReduceKernel : public Collective {
 public:
  explicit ReduceKernel(OpKernelConstruction* construction) : Collective(construction) {
    std::string merge_op, final_op;
    OP_REQUIRES_OK(construction, construction->GetAttr("merge_op", &merge_op));
    OP_REQUIRES_OK(construction, construction->GetAttr("final_op", &final_op));
    kind_ = merge_op == "Add"   ? kAdd
            : merge_op == "Mul" ? kMultiply
            : merge_op == "Min" ? kMinimum
                                : kMaximum;
    if (final_op == "Div") kind_ |= kMean;
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    Send(context, std::move(done), kind_, Reduce<T>);
  }

 private:
  int kind_ = kAdd;
};

// Of each device's tensor, the slice that has the place of this one in the group.
absl::Status AllToAll(const Call& call, const Round& round) {
  Tensor* output = nullptr;
  absl::Status status = call.context->allocate_output(0, call.context->input(0).shape(), &output);
  if (!status.ok()) return status;
  const auto& all = round.contributions;
  const size_t place = std::distance(all.begin(), all.find(call.device));
  const size_t num_bytes = round.first.num_bytes / all.size();
  auto* out = static_cast<char*>(output->data());
  for (auto& [device, one] : all) {
    memcpy(out, one.data + place * num_bytes, num_bytes);
    out += num_bytes;
  }
  return absl::OkStatus();
}

class AllToAllKernel : public Collective {
 public:
  using Collective::Collective;

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    const Tensor& x = context->input(0);
    const int group_size = scalar(context, 1);
    OP_REQUIRES_ASYNC(
        context, x.dims() > 0 && x.dim_size(0) == group_size,
        absl::InvalidArgumentError(absl::StrCat("expected one slice for each of ", group_size,
                                                " devices, got shape ", x.shape().DebugString())),
        done);
    Send(context, std::move(done), kAllToAll, AllToAll);
  }
};

// The tensors of all devices, one after the other.
absl::Status Gather(const Call& call, const Round& round) {
  tensorflow::TensorShape shape = call.context->input(0).shape();
  shape.set_dim(0, shape.dim_size(0) * round.first.group_size);
  Tensor* output = nullptr;
  absl::Status status = call.context->allocate_output(0, shape, &output);
  if (!status.ok()) return status;
  auto* out = static_cast<char*>(output->data());
  for (auto& [device, one] : round.contributions) {
    memcpy(out, one.data, round.first.num_bytes);
    out += round.first.num_bytes;
  }
  return absl::OkStatus();
}

class GatherKernel : public Collective {
 public:
  using Collective::Collective;

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    const Tensor& x = context->input(0);
    OP_REQUIRES_ASYNC(
        context, x.dims() > 0,
        absl::InvalidArgumentError("expected tensors of at least one dimension, got a scalar"),
        done);
    Send(context, std::move(done), kGather, Gather);
  }
};

#define REGISTER_REDUCE(T)                                                              \
  REGISTER_KERNEL_BUILDER(                                                              \
      Name("CollectiveReduceV2").Device(DEVICE_CPU).TypeConstraint<T>("T").Priority(1), \
      ReduceKernel<T>)
REGISTER_REDUCE(float);
REGISTER_REDUCE(double);
REGISTER_REDUCE(int32_t);
REGISTER_REDUCE(int64_t);
REGISTER_REDUCE(Eigen::half);
REGISTER_REDUCE(Eigen::bfloat16);
#undef REGISTER_REDUCE

REGISTER_KERNEL_BUILDER(Name("CollectiveAllToAllV2").Device(DEVICE_CPU).Priority(1),
                        AllToAllKernel);
REGISTER_KERNEL_BUILDER(Name("CollectiveGatherV2").Device(DEVICE_CPU).Priority(1), GatherKernel);

}  // namespace
}  // namespace dtransformer

// What Python calls. Returns what is wrong, or an empty text.
extern "C" const char* dtransformer_start(int group, int process, int num_processes,
                                          int num_devices, const int* files, size_t size) {
  static std::string problem;
  absl::Status status = dtransformer::Exchange::Make(group).Start(process, num_processes,
                                                                  num_devices, files, size);
  problem = std::string(status.message());
  return problem.c_str();
}

extern "C" void dtransformer_fail(int group) { dtransformer::Exchange::Of(group).Fail(); }

extern "C" void dtransformer_stop(int group) { dtransformer::Exchange::Of(group).Stop(); }
