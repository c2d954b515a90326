// Blocks of shared memory, which other processes read and then release.

#ifndef DTRANSFORMER_BLOCKS_H_
#define DTRANSFORMER_BLOCKS_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

namespace dtransformer {

// A block begins with this; what is shared follows at a multiple of 64 bytes, as TensorFlow's own.
struct alignas(64) BlockHead {
  std::atomic<int32_t> num_readers;  // that have not released it
};

// Gives blocks out of one process' shared memory. Sizes are powers of two, so that few differ and
// a block serves again for the next tensor of about its size; pages that nobody touches cost
// nothing. Only the process that owns the memory asks for blocks, one thread at a time.
class Blocks {
 public:
  static constexpr size_t kNone = SIZE_MAX;

  void Reset(char* begin, size_t size) {
    begin_ = begin, size_ = size, used_ = 0;
    free_.clear(), taken_.clear();
  }

  // Returns where a block of so many bytes begins, or kNone where there is no room.
  size_t Take(size_t num_bytes, int num_readers) {
    Collect();
    size_t size = kSmallest;
    while (size < num_bytes + sizeof(BlockHead)) size *= 2;
    std::vector<size_t>& free = free_[size];
    size_t block;
    if (!free.empty()) {
      block = free.back();  // the last one that was used, which caches may still hold
      free.pop_back();
    } else if (size <= size_ - used_) {
      block = used_;
      used_ += size;
    } else {
      return kNone;
    }
    head(block)->num_readers.store(num_readers, std::memory_order_relaxed);
    taken_.push_back({block, size});
    return block;
  }

  char* data(size_t block) { return begin_ + block + sizeof(BlockHead); }

 private:
  static constexpr size_t kSmallest = 4096;

  BlockHead* head(size_t block) { return reinterpret_cast<BlockHead*>(begin_ + block); }

  // Takes back what all readers have released.
  void Collect() {
    for (size_t i = taken_.size(); i-- > 0;) {
      auto [block, size] = taken_[i];
      if (head(block)->num_readers.load(std::memory_order_acquire) == 0) {
        free_[size].push_back(block);
        taken_[i] = taken_.back();
        taken_.pop_back();
      }
    }
  }

  char* begin_ = nullptr;
  size_t size_ = 0, used_ = 0;
  std::map<size_t, std::vector<size_t>> free_;    // by size
  std::vector<std::pair<size_t, size_t>> taken_;  // of block and size
};

}  // namespace dtransformer

#endif  // DTRANSFORMER_BLOCKS_H_
