#include "exchange.h"

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cfenv>
#include <climits>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tsl/platform/denormal.h"
#include "tsl/platform/setround.h"

namespace dtransformer {
namespace {

using tensorflow::CancellationManager;
using tensorflow::Tensor;

absl::Status StepFailed() {
  return absl::AbortedError(
      "a step of this or of another process of the group has failed between its collectives, so "
      "that later ones would not fit together: start the job again");
}

absl::Status StepEnded() { return absl::CancelledError("another operation of the step has failed"); }

void Ring(std::atomic<uint32_t>* bell) {
  bell->fetch_add(1, std::memory_order_release);
  syscall(SYS_futex, bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Waits until a bell has been rung since it was read as `seen`.
void AwaitBell(std::atomic<uint32_t>* bell, uint32_t seen) {
  timespec at_most = {1, 0};
  syscall(SYS_futex, bell, FUTEX_WAIT, seen, &at_most, nullptr, 0);
}

void End(const Call& call, const absl::Status& status) {
  CancellationManager* manager = call.context->cancellation_manager();
  if (manager != nullptr) manager->DeregisterCallback(call.token);
  if (!status.ok()) call.context->SetStatus(status);
  call.done();
}

void ComputeAndEnd(const Call& call, std::shared_ptr<Round> round) {
  absl::Status status;
  if (round->differs)
    status = absl::InvalidArgumentError(
        "what the devices of a group send each other differs in size, type or purpose");
  else
    status = call.computation(call, *round);
  round.reset();  // what others have sent may be used again
  End(call, status);
}

// Computes what the devices of this process get, all but the last one by threads of TensorFlow.
void Finish(std::shared_ptr<Round> round) {
  std::vector<Call> calls;
  for (auto& [device, call] : round->calls) calls.push_back(call);
  if (calls.empty()) return;
  if (calls.size() == 1)  // nobody else reads what it sent: its result may take that memory
    round->contributions.at(calls[0].device).keeper.reset();
  for (size_t i = 0; i + 1 < calls.size(); ++i)
    (*calls[i].context->runner())([call = calls[i], round]() mutable {
      ComputeAndEnd(call, std::move(round));
    });
  ComputeAndEnd(calls.back(), std::move(round));
}

std::mutex exchanges_mutex;

std::map<int32_t, Exchange*>& Exchanges() {
  static auto* exchanges = new std::map<int32_t, Exchange*>{{kMesh, new Exchange}};
  return *exchanges;
}

}  // namespace

Exchange& Exchange::Of(int32_t group) {
  std::lock_guard<std::mutex> lock(exchanges_mutex);
  auto found = Exchanges().find(group);
  return *(found == Exchanges().end() ? Exchanges().at(kMesh) : found->second);
}

Exchange& Exchange::Make(int32_t group) {
  std::lock_guard<std::mutex> lock(exchanges_mutex);
  Exchange*& exchange = Exchanges()[group];
  if (exchange == nullptr) exchange = new Exchange;
  return *exchange;
}

absl::Status Exchange::Start(int process, int num_processes, int num_devices, const int* files,
                             size_t size) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (is_started_) return absl::FailedPreconditionError("it is started already");
  if (num_processes > kMostProcesses)
    return absl::InvalidArgumentError(absl::StrCat("expected at most ", kMostProcesses,
                                                   " processes of a mesh, got ", num_processes));
  process_ = process, num_processes_ = num_processes, num_devices_ = num_devices, size_ = size;
  if (num_processes > 1) {
    for (int i = 0; i < num_processes; ++i) {
      void* at = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, files[i], 0);
      if (at == MAP_FAILED) {
        absl::Status status = absl::ResourceExhaustedError(strerror(errno));
        Unmap();
        return status;
      }
      shared_.push_back(static_cast<Shared*>(at));
    }
    num_read_.assign(num_processes, 0);
    blocks_.Reset(blocks_of(process), size - kHead);
    is_stopping_ = false;
    reader_ = std::thread([this] { Serve(); });
  }
  is_started_ = true;
  return absl::OkStatus();
}

void Exchange::Stop() {
  if (reader_.joinable()) {
    is_stopping_ = true;
    Ring(&shared_[process_]->bell);
    reader_.join();
  }
  std::lock_guard<std::mutex> lock(mutex_);
  rounds_.clear(), complete_.clear();
  Unmap();
  is_started_ = false;
}

void Exchange::Unmap() {
  for (Shared* one : shared_) munmap(one, size_);
  shared_.clear();
}

void Exchange::Send(Call call, const Key& key, int group_size) {
  call.device = process_ * num_devices_ + call.device % num_devices_;
  CancellationManager* manager = call.context->cancellation_manager();
  if (manager != nullptr) {
    call.token = manager->get_cancellation_token();
    call.is_cancelled = std::make_shared<std::atomic<bool>>(false);
    auto cancel = [this, key, device = call.device, is_cancelled = call.is_cancelled] {
      *is_cancelled = true;
      Cancel(key, device);
    };
    if (!manager->RegisterCallback(call.token, cancel)) {
      Fail();
      call.context->SetStatus(StepEnded());
      return call.done();
    }
  }
  absl::Status status = Announce(call, key, group_size);
  if (!status.ok()) {
    Fail();  // others may wait for what was not announced
    return End(call, status);
  }
  Advance();
}

absl::Status Exchange::Announce(const Call& call, const Key& key, int group_size) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!is_started_) return absl::FailedPreconditionError("no group is started");
  if (HasFailed()) return StepFailed();
  if (call.is_cancelled && *call.is_cancelled) return StepEnded();
  const bool is_own_group = std::get<0>(key) >= kFirstOwnGroup;
  if (is_own_group && group_size != num_processes_ * num_devices_)
    return absl::InvalidArgumentError(absl::StrCat("expected a group of ", num_processes_,
                                                   " processes, got one of ", group_size));
  if (auto begun = rounds_.find(key); is_own_group && begun != rounds_.end())
    for (const std::shared_ptr<Round>& round : begun->second)
      if (round->calls.count(call.device))
        return absl::FailedPreconditionError(
            "another operation of the same name is under way: other ranks may take the one for "
            "the other");
  const Tensor& x = call.context->input(0);
  auto [group, operation, frame, turn] = key;
  auto data = static_cast<const char*>(x.data());
  Announcement one{group,     operation, frame,          turn,        group_size,
                   call.kind, x.dtype(), x.TotalBytes(), call.device, 0};
  if (num_processes_ > 1) {
    absl::Status status = Share(&one, data);
    if (!status.ok()) return status;
  }
  Add(one, Contribution{data, std::make_shared<Tensor>(x)}).calls.emplace(call.device, call);
  return absl::OkStatus();
}

// Lets the other processes read a tensor.
absl::Status Exchange::Share(Announcement* one, const char* data) {
  Shared* own = shared_[process_];
  one->block = blocks_.Take(one->num_bytes, num_processes_ - 1);
  if (one->block == Blocks::kNone)
    return absl::ResourceExhaustedError(
        absl::StrCat("no shared memory is left for a tensor of ", one->num_bytes, " bytes"));
  memcpy(blocks_.data(one->block), data, one->num_bytes);
  uint64_t number = own->num_announced.load(std::memory_order_relaxed);
  while (number - SlowestReader() >= kRingSize) {
    Read();  // that process may wait for this one in the same way
    std::this_thread::yield();
  }
  own->ring[number % kRingSize] = *one;
  own->num_announced.store(number + 1, std::memory_order_release);
  for (int i = 0; i < num_processes_; ++i)
    if (i != process_) Ring(&shared_[i]->bell);
  return absl::OkStatus();
}

uint64_t Exchange::SlowestReader() const {
  uint64_t slowest = UINT64_MAX;
  for (int i = 0; i < num_processes_; ++i)
    if (i != process_)
      slowest = std::min(slowest, shared_[process_]->num_read[i].load(std::memory_order_acquire));
  return slowest;
}

// Adds a tensor to the first round that has none of its device. So the rounds of a key are
// complete in the order in which they began.
Round& Exchange::Add(const Announcement& one, Contribution contribution) {
  const Key key{one.group, one.operation, one.frame, one.turn};
  Rounds& rounds = rounds_[key];
  auto at = std::find_if(rounds.begin(), rounds.end(), [&](const std::shared_ptr<Round>& round) {
    return !round->contributions.count(one.device);
  });
  if (at == rounds.end()) {
    rounds.push_back(std::make_shared<Round>());
    at = rounds.end() - 1;
    (*at)->first = one;
  }
  Round& round = **at;
  const Announcement& first = round.first;
  round.differs |= first.group_size != one.group_size || first.kind != one.kind ||
                   first.dtype != one.dtype || first.num_bytes != one.num_bytes;
  round.contributions.emplace(one.device, std::move(contribution));
  if (round.contributions.size() == static_cast<size_t>(first.group_size)) {
    complete_.push_back(*at);
    rounds.erase(at);
    if (rounds.empty()) rounds_.erase(key);
  }
  return round;
}

void Exchange::Read() {
  for (int i = 0; i < static_cast<int>(shared_.size()); ++i)
    if (i != process_) Read(i);
}

void Exchange::Read(int process) {
  Shared* theirs = shared_[process];
  uint64_t num_announced = theirs->num_announced.load(std::memory_order_acquire);
  for (uint64_t& number = num_read_[process]; number < num_announced; ++number) {
    const Announcement one = theirs->ring[number % kRingSize];
    char* block = blocks_of(process) + one.block;
    auto release = [](void* block) {
      static_cast<BlockHead*>(block)->num_readers.fetch_sub(1, std::memory_order_release);
    };
    Add(one, Contribution{block + sizeof(BlockHead), std::shared_ptr<void>(block, release)});
  }
  theirs->num_read[process_].store(num_announced, std::memory_order_release);
}

// Reads what has come, and ends the calls whose rounds are complete.
void Exchange::Advance() {
  std::vector<std::shared_ptr<Round>> complete;
  std::vector<Call> failed;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    Read();
    complete.swap(complete_);
    if (HasFailed()) failed = TakeCalls();
  }
  for (const Call& call : failed) End(call, StepFailed());
  for (auto& round : complete) Finish(std::move(round));
}

void Exchange::Serve() {
  // As TensorFlow's own threads: results are the same to the last bit on all ranks.
  tsl::port::ScopedFlushDenormal flush;
  tsl::port::ScopedSetRound round(FE_TONEAREST);
  Shared* own = shared_[process_];
  while (!is_stopping_) {
    uint32_t bell = own->bell.load(std::memory_order_acquire);
    Advance();
    if (!is_stopping_) AwaitBell(&own->bell, bell);
  }
}

void Exchange::Fail() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (Shared* one : shared_) {
    one->failed = 1;
    Ring(&one->bell);
  }
}

// Ends a call of a step of which another operation has failed.
void Exchange::Cancel(const Key& key, int device) {
  Call call;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = rounds_.find(key);
    if (found == rounds_.end()) return;
    Rounds& rounds = found->second;
    auto at = std::find_if(rounds.begin(), rounds.end(), [&](const std::shared_ptr<Round>& round) {
      return round->calls.count(device);
    });
    if (at == rounds.end()) return;
    call = (*at)->calls.at(device);
    (*at)->calls.erase(device);
    (*at)->contributions.erase(device);
    if ((*at)->contributions.empty()) rounds.erase(at);
    if (rounds.empty()) rounds_.erase(found);
  }
  Fail();
  call.context->SetStatus(StepEnded());
  call.done();
}

std::vector<Call> Exchange::TakeCalls() {
  std::vector<Call> calls;
  for (auto& [key, rounds] : rounds_)
    for (auto& round : rounds) {
      for (auto& [device, call] : round->calls) calls.push_back(call);
      round->calls.clear();
    }
  return calls;
}

}  // namespace dtransformer
