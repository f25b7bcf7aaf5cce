// The generated ops of all packs: what a library needs to register them.
#pragma once

#include <deque>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "pack.h"

namespace tk {

// Whether the pack says what the op takes and returns.
bool is_generated(const Pack& pack, const format::Op& op);

// Not locked: the registry is.
class GeneratedOps {
 public:
  // Takes over the generated ops of a pack that is about to be loaded, all of them or, throwing TK_PACK_ERROR, none:
  // a name may mean one op only, whatever the architectures. The pack must stay.
  void add(const Pack& pack);
  // Throws TK_PACK_ERROR when a pack has a generated op of this name already.
  void reserve(const std::string& name);
  // Stays where it is; nullptr past the last.
  const tk_generated_op* at(uint32_t index) const { return index < ops_.size() ? &ops_[index].row : nullptr; }

 private:
  struct Entry {
    const Pack* pack;
    const format::Op* op;
    tk_generated_op row{};  // its pointers are into the pack, and the vectors below
    std::vector<tk_param> params{};
    std::vector<tk_code> locals{};
    std::vector<tk_check> checks{};
    std::vector<tk_result> results{};
    std::string twin_schema{};
  };

  const Entry* find(std::string_view name) const;
  bool is_new(const Pack& pack, const format::Op& op) const;
  static void fill(Entry& entry);

  std::deque<Entry> ops_;  // entries never move
  std::unordered_map<std::string_view, const Entry*> by_name_;
  std::set<std::string, std::less<>> reserved_;
};

}  // namespace tk
