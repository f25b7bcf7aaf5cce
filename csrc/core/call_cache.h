// What this thread has worked out for calls, by everything that expressions can read of a call.
#pragma once

#include <algorithm>
#include <bit>
#include <memory>

#include "problem.h"

namespace tk {

// A call's numbers, without addresses and floats.
class CallKey {
 public:
  explicit CallKey(const tk_call& call) {
    add(call.op | uint64_t{call.mode} << 32);
    add(static_cast<uint32_t>(call.config) | static_cast<uint64_t>(call.device) << 32);
    add(call.n_tensors | uint64_t{call.n_ints} << 8 | uint64_t{call.n_floats} << 16);
    for (uint32_t i = 0; i < call.n_tensors; i++) add(call.tensors[i]);
    for (uint32_t i = 0; i < call.n_ints; i++) add(static_cast<uint64_t>(call.ints[i]));
    hash_ = (hash_ ^ hash_ >> 29) * kFactor;
    hash_ ^= hash_ >> 32;
  }

  uint64_t hash() const { return hash_; }
  std::span<const uint64_t> words() const { return {words_, count_}; }

 private:
  static constexpr uint64_t kFactor = 0x9e3779b97f4a7c15;  // 2**64 / golden ratio

  void add(const tk_tensor& t) {
    if (t.ndim < 0) return add(UINT64_MAX);
    const auto alignment = static_cast<uint64_t>(std::countr_zero(reinterpret_cast<uintptr_t>(t.data) | 256));
    add(static_cast<uint32_t>(t.dtype) | static_cast<uint64_t>(t.ndim) << 32 | alignment << 40);
    for (int32_t d = 0; d < t.ndim; d++) {
      add(static_cast<uint64_t>(t.sizes[d]));
      add(static_cast<uint64_t>(t.strides[d]));
    }
  }
  void add(uint64_t word) {
    words_[count_++] = word;
    hash_ = std::rotl((hash_ ^ word) * kFactor, 23);
  }

  uint32_t count_ = 0;
  uint64_t hash_ = 0;
  uint64_t words_[3 + TK_MAX_TENSORS * (1 + 2 * TK_MAX_DIMS) + TK_MAX_INTS];
};

// Four-way set-associative, 512 entries. For one thread; nothing here is locked.
template <class Value>
class CallCache {
 public:
  // nullptr when the call is not there, or was put there in an earlier generation of the registry.
  Value* find(const CallKey& key, uint64_t generation) {
    Set& set = set_of(key);
    for (uint32_t way = 0; way < kWays; way++) {
      if (set.hashes[way] != key.hash() || !set.entries[way]) continue;
      Entry& entry = *set.entries[way];
      if (entry.generation == generation && std::ranges::equal(entry.key, key.words())) return &entry.value;
    }
    return nullptr;
  }

  Value* insert(const CallKey& key, uint64_t generation, Value value) {
    Set& set = set_of(key);
    const uint32_t way = set.next++ % kWays;
    auto words = key.words();
    set.entries[way] =
        std::make_unique<Entry>(Entry{generation, std::vector<uint64_t>(words.begin(), words.end()), std::move(value)});
    set.hashes[way] = key.hash();
    return &set.entries[way]->value;
  }

  // Set while an entry is in use: an allocator that launches something itself must not have it replaced under us.
  bool busy = false;

 private:
  static constexpr uint32_t kWays = 4;
  static constexpr uint32_t kSets = 128;

  struct Entry {
    uint64_t generation;
    std::vector<uint64_t> key;
    Value value;
  };
  struct Set {
    uint64_t hashes[kWays] = {};
    std::unique_ptr<Entry> entries[kWays];
    uint32_t next = 0;
  };

  Set& set_of(const CallKey& key) { return sets_[key.hash() % kSets]; }

  Set sets_[kSets];
};

// This thread's own, made on first use.
template <class Cache>
Cache& thread_cache() {
  // A plain pointer costs less to reach than an object with a constructor.
  static thread_local Cache* cache = nullptr;
  if (!cache) [[unlikely]] {
    static thread_local const auto owner = std::make_unique<Cache>();
    cache = owner.get();
  }
  return *cache;
}

}  // namespace tk
