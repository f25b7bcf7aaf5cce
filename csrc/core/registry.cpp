#include "registry.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <set>

namespace tk {
namespace {

// How well code for a target suits a GPU; nullopt when it does not run there. From 9.0 on Triton compiles for exactly
// one architecture (sm_90a), unless the target is a family; before, a cubin runs on every later GPU of its generation.
std::optional<uint32_t> suitability(const Target& target, uint32_t gpu) {
  if (target.arch > gpu) return std::nullopt;
  if (target.is_ptx()) return target.arch << 1;
  const bool is_exact = gpu >= 90 && !target.is_family();
  const bool runs = is_exact ? target.arch == gpu : target.arch / 10 == gpu / 10;
  return runs ? std::optional(1u << 16 | target.arch << 1 | is_exact) : std::nullopt;
}

constexpr char kDefinitions[] = "ops.tkpack";
constexpr char kSuffix[] = ".tkpack";

// sm90.tkpack, sm100f.tkpack, ptx80.tkpack
std::optional<Target> target_of_name(std::string_view name) {
  const bool is_ptx = name.starts_with("ptx");
  if ((!is_ptx && !name.starts_with("sm")) || !name.ends_with(kSuffix)) return std::nullopt;
  name = name.substr(is_ptx ? 3 : 2);
  name.remove_suffix(std::strlen(kSuffix));
  const bool is_family = !is_ptx && name.ends_with("f");
  if (is_family) name.remove_suffix(1);
  Target found{.flags = is_ptx ? format::kPtx : is_family ? format::kFamily : 0};
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), found.arch);
  return error == std::errc() && end == name.data() + name.size() ? std::optional(found) : std::nullopt;
}

// The files that a path stands for: itself where it is there, else those with an architecture before its suffix.
std::vector<std::string> files_of(const std::string& path) {
  const std::filesystem::path whole(path);
  std::error_code missing;
  if (whole.extension() != kSuffix || std::filesystem::exists(whole, missing)) return {path};
  std::vector<std::string> found;
  const std::string stem = whole.stem().string() + ".";
  const auto folder = whole.has_parent_path() ? whole.parent_path() : std::filesystem::path(".");
  for (const auto& file : std::filesystem::directory_iterator(folder, missing)) {
    const std::string name = file.path().filename().string();
    if (name.starts_with(stem) && target_of_name(std::string_view(name).substr(stem.size())))
      found.push_back((whole.parent_path() / name).string());
  }
  std::ranges::sort(found);
  return found.empty() ? std::vector{path} : found;
}

bool allows_unrooted() {
  const char* const value = std::getenv("TK_UNROOTED_PACKS");
  return value && std::strcmp(value, "1") == 0;
}

std::string joined(const std::set<std::string>& items) {
  std::string out;
  for (const auto& item : items) out += (out.empty() ? "" : ", ") + item;
  return out;
}

}  // namespace

std::string Target::text() const { return tk::text(is_ptx() ? "ptx" : "sm_", arch, is_family() ? "f" : ""); }

namespace {

// What tk build makes for a GPU: an sm_80 cubin serves all of 8.x, and what is newer than 9.0 compiles PTX itself.
const char* built_for(uint32_t arch) { return arch < 90 ? "80" : arch == 90 ? "90" : "ptx80"; }

constexpr char kTooOld[] = "tk build makes none for GPUs older than sm_80";

// For a GPU that the library has no pack for.
std::string advice_of_arch(uint32_t arch) {
  if (arch < 80) return kTooOld;
  const std::string built = built_for(arch);
  return text("compile them, which takes an hour: python -m tk build --all -o FOLDER --arch ", built,
              ", and load what is made: tk.load_pack('FOLDER/", built.starts_with("ptx") ? "" : "sm", built,
              ".tkpack')");
}

}  // namespace

std::string advice(const char* op, bool is_own, uint32_t arch) {
  if (arch < 80) return kTooOld;
  if (is_own) return text("python -m tk list --op ", op, " lists the kernels that there are");
  return text("declare one in the op's file, and build it: python -m tk build FILE.py -o my.tkpack --arch ",
              built_for(arch));
}

std::atomic<uint64_t> Registry::generation_{1};

// --- OpNames ---

tk_op OpNames::intern(std::string_view name) {
  {
    std::shared_lock lock(mutex_);
    if (const auto found = numbers_.find(name); found != numbers_.end()) return found->second;
  }
  std::unique_lock lock(mutex_);
  if (const auto found = numbers_.find(name); found != numbers_.end()) return found->second;
  const auto number = static_cast<tk_op>(names_.size());
  numbers_[names_.emplace_back(name)] = number;
  return number;
}

const char* OpNames::name(tk_op op) {
  std::shared_lock lock(mutex_);
  return op < names_.size() ? names_[op].c_str() : nullptr;
}

// --- The library's own packs ---

void Registry::set_builtin_directory(const std::string& path) {
  std::unique_lock lock(mutex_);
  if (directory_ == path) return;
  if (!directory_.empty())
    fail(TK_PACK_ERROR, "the packs of this library are those of ", directory_, " already, they cannot be those of ",
         path, " too");
  directory_ = path;
  next_generation();
  open_definitions();
}

const Root* Registry::root_of(std::string_view file) const {
  const auto found = std::ranges::find_if(roots_, [&](const Root& root) { return file == root.file; });
  return found == roots_.end() ? nullptr : &*found;
}

void Registry::open_definitions() {
  const std::filesystem::path path = std::filesystem::path(directory_) / kDefinitions;
  const Root* const root = root_of(kDefinitions);
  std::error_code missing;
  const bool is_unrooted = roots_.empty() && allows_unrooted() && std::filesystem::exists(path, missing);
  if (!root && !is_unrooted) return;
  auto pack = Pack::open(path.string(), root ? root->hash : "", true);
  if (pack->target().arch != 0)
    fail(TK_PACK_ERROR, "pack ", pack->path(), " is for ", pack->target().text(), ", it should define ops for any GPU");
  generated_.add(*pack);
  definitions_ = std::move(pack);
}

// Which files there are, by name: a file that is missing or damaged is still known to belong here, so that no other
// pack takes its place in silence.
void Registry::find_builtins() {
  if (searched_ || directory_.empty()) return;
  const std::filesystem::path directory(directory_);
  std::vector<Builtin> own;
  for (const Root& root : roots_) {
    if (std::string_view(root.file) == kDefinitions) continue;
    const auto target = target_of_name(root.file);
    if (!target)
      fail(TK_PACK_ERROR, "roots.inc names ", root.file, "; it must be ops.tkpack or like sm90.tkpack or ptx80.tkpack");
    own.push_back({(directory / root.file).string(), root.hash, *target, nullptr});
  }
  std::error_code missing;  // a folder that is not there has no packs
  for (const auto& file : std::filesystem::directory_iterator(directory, missing)) {
    const auto target = target_of_name(file.path().filename().string());
    if (!roots_.empty() || !target) continue;
    if (allows_unrooted()) {
      own.push_back({file.path().string(), "", *target, nullptr});
    } else {
      unrooted_ = file.path().string();
    }
  }
  // Before those of added folders: of two for one architecture the library's own serves.
  builtins_.insert(builtins_.begin(), std::make_move_iterator(own.begin()), std::make_move_iterator(own.end()));
  searched_ = true;
}

void Registry::add_directory(const std::string& path) {
  std::unique_lock lock(mutex_);
  if (std::ranges::find(added_, path) != added_.end()) return;
  find_builtins();
  std::vector<Builtin> added;
  std::error_code missing;
  for (const auto& file : std::filesystem::directory_iterator(path, missing)) {
    const auto target = target_of_name(file.path().filename().string());
    if (!target) continue;
    Builtin found{file.path().string(), "", *target, nullptr};
    for (const Builtin& other : builtins_)
      if (other.target == found.target)
        fail(TK_PACK_ERROR, "pack ", found.path, " is for ", found.target.text(), ", as ", other.path,
             " is; leave one of them out");
    added.push_back(std::move(found));
  }
  if (added.empty())
    fail(TK_PACK_ERROR, "there are no packs in ", path,
         "; their names must be like sm100.tkpack, sm100f.tkpack or ptx100.tkpack");
  std::ranges::sort(added, {}, &Builtin::path);
  std::ranges::move(added, std::back_inserter(builtins_));
  added_.push_back(path);
  next_generation();
}

const Pack& Registry::open(Builtin& builtin) {
  if (builtin.pack) return *builtin.pack;
  auto pack = Pack::open(builtin.path, builtin.root, true);
  if (pack->target() != builtin.target)
    fail(TK_PACK_ERROR, "pack ", builtin.path, " is for ", pack->target().text(), ", not what its name says");
  check_clash(*pack);
  generated_.add(*pack);
  builtin.pack = std::move(pack);
  return *builtin.pack;
}

Registry::Builtin* Registry::best_builtin(uint32_t arch) {
  find_builtins();
  Builtin* best = nullptr;
  uint32_t best_suitability = 0;
  for (Builtin& builtin : builtins_) {
    const auto suits = suitability(builtin.target, arch);
    if (!suits || *suits <= best_suitability) continue;
    best = &builtin;
    best_suitability = *suits;
  }
  return best;
}

// --- Packs of users ---

void Registry::load(const std::string& path) {
  for (const std::string& file : files_of(path)) load_file(file);
}

void Registry::load_file(const std::string& path) {
  std::unique_ptr<const Pack> pack = Pack::open(path);
  std::unique_lock lock(mutex_);
  find_builtins();
  for (Builtin& builtin : builtins_)
    if (builtin.target == pack->target()) open(builtin);
  if (is_loaded(*pack)) return;
  check_clash(*pack);
  user_.reserve(user_.size() + 1);  // so that nothing fails once its ops are known
  generated_.add(*pack);
  user_.push_back(std::move(pack));
  next_generation();
}

bool Registry::is_loaded(const Pack& pack) const {
  const auto same = [&](const Pack* other) { return other && other->index_hash() == pack.index_hash(); };
  return same(definitions_.get()) ||
         std::any_of(builtins_.begin(), builtins_.end(), [&](const Builtin& b) { return same(b.pack.get()); }) ||
         std::any_of(user_.begin(), user_.end(), [&](const auto& p) { return same(p.get()); });
}

// Two packs for one architecture with one op name: which of them would run is nobody's guess. Of an op whose packs say
// what it takes and returns GeneratedOps has made sure that they mean the same: there the first serves, and another
// what the first has no kernel for.
void Registry::check_clash(const Pack& pack) const {
  const auto compare = [&](const Pack* other) {
    if (!other || other->target() != pack.target()) return;
    for (const format::Op& op : pack.all<format::Op>())
      if (!is_generated(pack, op) && other->find_op(pack.string(op.name)))
        fail(TK_PACK_ERROR, "op \"", pack.string(op.name), "\" for ", pack.target().text(), " is in both ",
             other->path(), " and ", pack.path(), "; leave one of them out, or rename the op and build again");
  };
  for (const Builtin& builtin : builtins_) compare(builtin.pack.get());
  for (const auto& other : user_) compare(other.get());
}

// --- Finding an op ---

std::vector<OpInPack> Registry::find(const char* op, uint32_t arch) {
  std::unique_lock lock(mutex_);
  std::vector<OpInPack> found = find_open(op, arch);
  if (found.empty()) fail_not_found(op, arch);
  return found;
}

std::vector<OpInPack> Registry::find_open(const char* op, uint32_t arch) {
  std::vector<OpInPack> found;
  const auto suits = [&](const Pack& pack) { return suitability(pack.target(), arch); };
  const auto add = [&](const Pack& pack) {
    if (!suits(pack)) return;
    if (const format::Op* const row = pack.find_op(op)) found.push_back({&pack, row});
  };
  if (Builtin* const builtin = best_builtin(arch)) add(open(*builtin));
  for (const auto& pack : user_) add(*pack);
  std::ranges::stable_sort(found, std::greater{}, [&](const OpInPack& row) { return *suits(*row.pack); });
  return found;
}

std::vector<OpInPack> Registry::all(uint32_t arch) {
  std::unique_lock lock(mutex_);
  std::set<std::string> names;
  const auto add = [&](const Pack& pack) {
    for (const format::Op& op : pack.all<format::Op>()) names.insert(pack.string(op.name));
  };
  if (Builtin* builtin = best_builtin(arch)) add(open(*builtin));
  for (const auto& pack : user_)
    if (suitability(pack->target(), arch)) add(*pack);
  std::vector<OpInPack> found;
  for (const auto& name : names) std::ranges::copy(find_open(name.c_str(), arch), std::back_inserter(found));
  return found;
}

void Registry::fail_not_found(const char* op, uint32_t arch) {
  std::set<std::string> archs;  // of those that have the op
  for (const auto& pack : user_)
    if (pack->find_op(op)) archs.insert(pack->target().text());
  bool is_own = definitions_ && definitions_->find_op(op);
  find_builtins();
  for (Builtin& builtin : builtins_) {
    try {
      if (!open(builtin).find_op(op)) continue;
    } catch (const Error&) {  // a call on a GPU that needs it says why
      continue;
    }
    archs.insert(builtin.target.text());
    is_own = true;
  }
  const bool has_pack = best_builtin(arch);
  const std::string build = is_own && !has_pack ? advice_of_arch(arch) : advice(op, is_own, arch);
  if (has_pack || archs.empty())
    fail(TK_VARIANT_NOT_FOUND, "no pack has an op \"", op, "\" for sm_", arch,
         archs.empty() ? "" : "; it is there for " + joined(archs),
         unrooted_.empty()
             ? ""
             : "; " + unrooted_ +
                   " was left aside, for this library was built without roots (set TK_UNROOTED_PACKS=1 to use it)",
         is_own ? "; " : "; load a pack that has it (tk.load_pack, TK_PACK_PATH), or ", build);
  fail(TK_UNSUPPORTED, "op \"", op, "\" has no kernels for this GPU (sm_", arch, "); there are kernels for ",
       joined(archs), "; ", build);
}

std::vector<Registry::Listed> Registry::list() {
  std::unique_lock lock(mutex_);
  find_builtins();
  std::vector<Listed> rows;
  for (Builtin& builtin : builtins_) {
    try {
      rows.push_back({builtin.path, true, &open(builtin), ""});
    } catch (const Error& error) {
      rows.push_back({builtin.path, true, nullptr, error.what()});
    }
  }
  if (definitions_) rows.push_back({definitions_->path(), true, definitions_.get(), ""});
  for (const auto& pack : user_) rows.push_back({pack->path(), false, pack.get(), ""});
  return rows;
}

const Pack* Registry::before(const Pack& pack, const char* op) {
  for (const Listed& row : list()) {
    if (row.pack == &pack) break;
    if (row.pack && row.pack->target() == pack.target() && row.pack->find_op(op)) return row.pack;
  }
  return nullptr;
}

// --- Generated ops ---

const tk_generated_op* Registry::generated_op(uint32_t index) {
  std::shared_lock lock(mutex_);
  return generated_.at(index);
}

void Registry::reserve(const std::string& name) {
  std::unique_lock lock(mutex_);
  generated_.reserve(name);
}

// --- Measured choices ---

void Registry::pin(const PinKey& key, std::optional<uint32_t> config) {
  std::unique_lock lock(mutex_);
  if (config) {
    pins_[key] = *config;
  } else {
    pins_.erase(key);
  }
  next_generation();
}

std::optional<uint32_t> Registry::pinned(const PinKey& key) {
  std::shared_lock lock(mutex_);
  const auto found = pins_.find(key);
  return found == pins_.end() ? std::nullopt : std::optional(found->second);
}

}  // namespace tk
