// What is in the packs, for `tk info`, explain and coverage. Plain copies: nothing here is fast, all of it is safe to
// keep.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tk/tk.h"

namespace tk::inspect {

struct Config {
  uint32_t number;
  std::string name;
  std::string params;  // JSON object
};

struct Launch {
  std::string image;  // what it was compiled from
  std::string entry;
  uint32_t threads;
  uint32_t shared;  // dynamic shared memory, bytes
  uint32_t cluster;
  uint64_t size;             // of the cubin or PTX, bytes
  uint64_t compressed_size;  // in the pack
};

struct Variant {
  uint32_t number;  // in its pack, as in tk_choice
  std::string kernel;
  uint32_t config;
  std::string config_name;
  bool general;
  bool deterministic;
  std::vector<std::string> constraints;  // each completes "this variant needs …"
  std::vector<Launch> launches;
};

struct Op {
  std::string name;
  std::string schema;  // "" where a library registers it
  uint32_t n_tensors;
  uint32_t n_ints;
  uint32_t n_floats;
  uint32_t n_outputs;
  uint32_t n_buckets;
  uint32_t n_variants;
  uint32_t n_pins;
  std::vector<Config> configs;
};

struct Pack {
  std::string path;
  bool builtin;
  std::string problem;  // why it cannot be used; "" when it can. Then the rest is empty
  uint32_t arch;        // 90 for 9.0; for PTX the oldest GPU it serves
  bool ptx;
  std::string compiler;
  std::string hash;  // SHA-256 of the index
  uint64_t file_size;
  uint32_t n_images;
  std::vector<Op> ops;
};

// All packs that are loaded or belong to the library, whatever GPUs there are.
TK_API std::vector<Pack> packs();

// The variants of an op in a pack, by the pack's path. Throws std::out_of_range when there is none.
TK_API std::vector<Variant> variants(const std::string& pack, const std::string& op);

// Unpacks every image of a pack and holds it against its hash. Returns "" or what is wrong.
TK_API std::string verify(const std::string& path);

// A number to put into tk_call.device for choosing (not launching) as on a GPU that this machine may not have.
// arch: 90 for 9.0. shared_optin: the most shared memory of a block, bytes. Throws std::runtime_error after 64 of them.
TK_API int32_t describe_device(int64_t sm_count, int64_t arch, int64_t shared_optin, int64_t l2_bytes);

}  // namespace tk::inspect
