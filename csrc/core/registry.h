// Which packs there are, and which of them serves an op on a GPU.
#pragma once

#include <array>
#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <vector>

#include "generated.h"

namespace tk {

// Ops by name and by number.
class OpNames {
 public:
  tk_op intern(std::string_view name);
  const char* name(tk_op op);  // nullptr for a number that was never given out

 private:
  std::shared_mutex mutex_;
  std::deque<std::string> names_;  // never move
  std::unordered_map<std::string_view, tk_op> numbers_;
};

// A pack of the library's own, and the index hash it must have. The table comes from roots.inc.
struct Root {
  const char* file;  // sm90.tkpack, sm100f.tkpack, ptx80.tkpack, ops.tkpack
  const char* hash;  // hexadecimal
};
std::span<const Root> compiled_roots();

// An op as one pack has it.
struct OpInPack {
  const Pack* pack = nullptr;
  const format::Op* op = nullptr;
};

// The end of a message that says that no kernel fits: what builds one for this GPU, or, of the library's own ops, which
// no file of a user's declares, what lists the kernels that there are.
std::string advice(const char* op, bool is_own, uint32_t arch);

using PinKey = std::tuple<const format::Op*, int64_t, std::array<int64_t, 4>>;

class Registry {
 public:
  explicit Registry(std::span<const Root> roots = compiled_roots()) : roots_(roots) {}

  // Opens the definitions of the library's own generated ops, if it has some. Throws TK_PACK_ERROR when there is
  // another directory already, or when they cannot be used; the directory's kernels then still can.
  void set_builtin_directory(const std::string& path);
  // A folder of packs of the library's kernels for more GPUs, by name (sm100.tkpack). Each is opened, and verified as a
  // whole, when a GPU first needs it. Throws TK_PACK_ERROR where the folder has none, or one for an architecture that
  // the library has a pack for. Adding a folder twice does nothing.
  void add_directory(const std::string& path);
  // A file; or, of a pack that was built for several architectures and whose name stands for all of its files
  // (my.tkpack: my.sm80.tkpack, my.sm90.tkpack), each of them: which one serves is a matter of the GPU of a call.
  // Loading a pack twice does nothing. Throws TK_PACK_ERROR.
  void load(const std::string& path);

  // The packs that serve an op on a GPU, the first before the others: those of its own architecture, then of an older
  // one that runs there too, then PTX; of one architecture the library's own pack, then the others as they were loaded.
  // There is one at least: else throws TK_VARIANT_NOT_FOUND or TK_UNSUPPORTED, saying what there is instead.
  std::vector<OpInPack> find(const char* op, uint32_t arch);
  // Every op that a GPU has, from each pack that serves it.
  std::vector<OpInPack> all(uint32_t arch);

  // The ops whose packs say what they take and return: see tk_generated_op_at and tk_reserve_op.
  const tk_generated_op* generated_op(uint32_t index);
  void reserve(const std::string& name);

  // All packs; the library's own are opened for it. The pointers are good for as long as the registry.
  struct Listed {
    std::string path;
    bool builtin;
    const Pack* pack;     // nullptr: it could not be opened
    std::string problem;  // why
  };
  std::vector<Listed> list();
  // The pack that serves an op before `pack` does, on every GPU; nullptr when that itself is the first.
  const Pack* before(const Pack& pack, const char* op);

  void pin(const PinKey& key, std::optional<uint32_t> config);
  std::optional<uint32_t> pinned(const PinKey& key);

  // Changes whenever an earlier answer of find() or pinned() may have. Never the same for two registries.
  static uint64_t generation() { return generation_.load(std::memory_order_acquire); }
  static void next_generation() { generation_.fetch_add(1, std::memory_order_release); }

 private:
  struct Builtin {
    std::string path;
    std::string root;  // "": any, of an add-on
    Target target;
    std::unique_ptr<const Pack> pack;  // once it was needed
  };

  void find_builtins();
  void open_definitions();
  const Root* root_of(std::string_view file) const;
  const Pack& open(Builtin& builtin);
  Builtin* best_builtin(uint32_t arch);
  bool is_loaded(const Pack& pack) const;
  void load_file(const std::string& path);
  void check_clash(const Pack& pack) const;
  std::vector<OpInPack> find_open(const char* op, uint32_t arch);
  [[noreturn]] void fail_not_found(const char* op, uint32_t arch);

  const std::span<const Root> roots_;
  std::shared_mutex mutex_;
  std::string directory_;
  std::vector<std::string> added_;  // directories
  bool searched_ = false;
  std::string unrooted_;  // a file of the directory that was not taken for want of roots
  std::vector<Builtin> builtins_;
  // ops.tkpack: what the library's generated ops take and return, without kernels, so that they are there on a machine
  // without a GPU.
  std::unique_ptr<const Pack> definitions_;
  std::vector<std::unique_ptr<const Pack>> user_;
  GeneratedOps generated_;  // what it refers to is in builtins_ and user_
  std::map<PinKey, uint32_t> pins_;
  static std::atomic<uint64_t> generation_;
};

}  // namespace tk
