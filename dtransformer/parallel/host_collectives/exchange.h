// How the devices of a group of processes on one host give each other tensors.
//
// Each process writes what its devices send into memory of its own, which the others map, and
// announces it in a ring there; a thread of each process reads the rings of all others. What
// belongs together is a round: one tensor of each device of a group. As soon as the last one has
// come, each device of this process computes its result from all of them, in the devices' order:
// so it is the same to the last bit on all devices and in every run. No thread waits in a kernel.

#ifndef DTRANSFORMER_EXCHANGE_H_
#define DTRANSFORMER_EXCHANGE_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "absl/status/status.h"
#include "blocks.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace dtransformer {

constexpr int kMostProcesses = 256;
constexpr uint64_t kRingSize = 4096;  // how many announcements the slowest reader may be behind

// What tensors of a round have in common: the group's key, the operation's own, and which turn of
// which loop it is. TensorFlow tells these apart in the same way.
using Key = std::tuple<int32_t, int32_t, uint64_t, int64_t>;

// What a device sends: the same on all devices of a round but for `device` and `block`.
struct Announcement {
  int32_t group, operation;
  uint64_t frame;
  int64_t turn;
  int32_t group_size, kind, dtype;
  uint64_t num_bytes;
  int32_t device;  // its number among those of all processes
  uint64_t block;
};

// The begin of the memory that a process shares; its blocks follow.
struct Shared {
  std::atomic<uint32_t> bell;    // rung by whoever has announced something
  std::atomic<uint32_t> failed;  // whether a step has ended between its collectives
  std::atomic<uint64_t> num_announced;
  std::atomic<uint64_t> num_read[kMostProcesses];  // by each of the others
  Announcement ring[kRingSize];
};

// A tensor of a round. `keeper` holds its memory as long as somebody may read it.
struct Contribution {
  const char* data;
  std::shared_ptr<void> keeper;
};

struct Round;
struct Call;
using Computation = std::function<absl::Status(const Call&, const Round&)>;

// The operation of a device of this process, which ends when its round is complete.
struct Call {
  tensorflow::OpKernelContext* context;
  tensorflow::AsyncOpKernel::DoneCallback done;
  Computation computation;  // its result, which it gives to the context
  int kind;                 // what is computed: devices of a round agree on it
  int device;
  std::shared_ptr<std::atomic<bool>> is_cancelled;  // maybe before it was announced
  tensorflow::CancellationToken token = tensorflow::CancellationManager::kInvalidToken;
};

struct Round {
  Announcement first;
  bool differs = false;  // whether devices have sent what does not belong together
  std::map<int, Contribution> contributions;  // by device
  std::map<int, Call> calls;                  // by device, of this process
};

// The key of the group that has an exchange for all groups without one of their own: the mesh,
// whose groups TensorFlow numbers by itself.
constexpr int32_t kMesh = 0;
// Keys of groups from here on have operations that are told apart by their names.
constexpr int32_t kFirstOwnGroup = 1 << 30;

class Exchange {
 public:
  // The one of a group, which is never destroyed; that of the mesh where it has none.
  static Exchange& Of(int32_t group);

  // Makes one for a group, if there is none.
  static Exchange& Make(int32_t group);

  // Starts with files of shared memory, one of each process, each of `size` bytes.
  absl::Status Start(int process, int num_processes, int num_devices, const int* files,
                     size_t size);

  // Ends; nothing may be under way.
  void Stop();

  // Tells all processes that a step has failed here: what was announced for it cannot be taken
  // back, and what was not will never come, so that no later round would be what they think it is.
  void Fail();

  // Sends the first input of a call. Its device is the number in this process. Where each process
  // sends for one device, that is it, wherever the operation is.
  void Send(Call call, const Key& key, int group_size);

 private:
  using Rounds = std::deque<std::shared_ptr<Round>>;

  absl::Status Announce(const Call& call, const Key& key, int group_size);
  absl::Status Share(Announcement* one, const char* data);
  Round& Add(const Announcement& one, Contribution contribution);
  void Read();
  void Read(int process);
  void Advance();
  void Serve();
  void Cancel(const Key& key, int device);
  void Unmap();
  std::vector<Call> TakeCalls();
  bool HasFailed() const { return !shared_.empty() && shared_[process_]->failed.load(); }
  uint64_t SlowestReader() const;
  char* blocks_of(int process) { return reinterpret_cast<char*>(shared_[process]) + kHead; }

  // Of what a process shares, before its blocks.
  static constexpr size_t kHead = (sizeof(Shared) + 4095) / 4096 * 4096;

  std::mutex mutex_;  // of all that follows
  bool is_started_ = false;
  std::atomic<bool> is_stopping_{false};
  int process_ = 0, num_processes_ = 1, num_devices_ = 1;
  size_t size_ = 0;
  std::vector<Shared*> shared_;  // by process; empty where there is only this one
  std::vector<uint64_t> num_read_;
  Blocks blocks_;
  std::map<Key, Rounds> rounds_;  // that are not complete, in the order in which they began
  std::vector<std::shared_ptr<Round>> complete_;
  std::thread reader_;
};

}  // namespace dtransformer

#endif  // DTRANSFORMER_EXCHANGE_H_
