// The bytes of a pack. docs/packs.md explains them; python/tk/aot/pack.py writes them; pack.cpp reads them.
//
// Little-endian, naturally aligned, offsets from the start of the file. Everything from the header to the end of the
// last section is the *index*: the header, the SHA-256 of each page of the sections, the sections. One hash over header
// and page hashes stands for all of it. Frames follow: images, many compressed together, each hashed by itself.
#pragma once

#include <cstdint>

namespace tk::format {

inline constexpr char kMagic[8] = {'T', 'K', 'P', 'A', 'C', 'K', '\r', '\n'};
inline constexpr uint32_t kVersion = 5;

enum class Section : uint32_t {
  Strings,      // NUL-terminated UTF-8, addressed by byte offset; offset 0 is ""
  Code,         // int64 words: expressions, see expr.h
  Ops,          // Op
  Locals,       // Expr: values computed once per problem (op) or per variant
  Configs,      // Config
  Buckets,      // Bucket, sorted by (op, key)
  Candidates,   // uint32 variant numbers, grouped by bucket
  Variants,     // Variant
  Constraints,  // Constraint
  Buffers,      // Buffer
  Launches,     // Launch
  Args,         // Arg
  TensorMaps,   // TensorMap
  Images,       // Image
  Outputs,      // Output
  Pins,         // Pin, sorted by (op, key, dims)
  Params,       // Param
  Frames,       // Frame
  Count
};

struct SectionEntry {
  uint64_t offset;
  uint64_t size;  // bytes
};

struct Header {
  char magic[8];
  uint32_t version;
  uint32_t arch;        // 10 * major + minor, e.g. 90; for a PTX pack the oldest architecture it serves
  uint32_t flags;       // kPtx, kFamily or neither
  uint32_t n_sections;  // Section::Count
  uint64_t file_size;
  uint64_t index_size;     // bytes from the start of the file to the end of the last section
  uint8_t index_hash[32];  // SHA-256 of the header, with this field as zeros, and the page hashes
  uint32_t compiler;       // string: "triton 3.9.0, ptxas 12.9"
  uint32_t n_pages;        // their hashes follow the header, the pages follow these
  SectionEntry sections[static_cast<uint32_t>(Section::Count)];
};
inline constexpr uint32_t kPtx = 1;
inline constexpr uint32_t kFamily = 2;  // cubins for sm_100f: for 10.0 and what is newer of 10.x

// Pages are read and hashed one by one, as they are needed: an op uses few. The last is shorter.
inline constexpr uint64_t kPageSize = 16384;
struct PageHash {
  uint8_t sha256[32];
};

struct Range {  // of entries of another section
  uint32_t first;
  uint32_t count;
};
using Expr = Range;  // of words of Section::Code; count 0 means the constant 0

struct Op {
  uint32_t name;
  uint32_t schema;     // of a generated op, as its params and outputs say it; "" for one that a library registers
  uint32_t n_tensors;  // inputs, then outputs
  uint32_t n_ints;
  uint32_t n_floats;
  uint32_t n_dims;   // how many of `dims` are used
  Range locals;      // evaluated in order before anything else; LOCAL i is the i-th
  Expr key;          // the bucket
  uint32_t dims[4];  // locals that make up the size key of a pin
  Range configs;
  Range buckets;
  Range variants;
  Range outputs;  // of a generated op: how to allocate what it returns
  Range pins;
  Range params;       // of a generated op: the arguments of its schema, in order
  Range checks;       // Constraints on the arguments: the first that fails is the caller's mistake
  uint32_t meta;      // of a generated op: JSON, read by Python alone
  uint32_t backward;  // string: the op that works out its gradients, or ""
  uint32_t n_saved;   // outputs at the end that are made for `backward` and not returned
};

enum class ParamKind : uint32_t {
  Tensor,
  Tensors,  // a list
  Float,
  Int,
  Bool,
  OptionalTensor,  // a tensor, or none: absent in the core
};
// An argument of a generated op's schema. Tensors of the core are the tensor params in order, then the outputs; ints
// are the int and bool params, floats the float params.
struct Param {
  uint32_t name;
  ParamKind kind;
  uint32_t flags;          // kLeading, kMutated, kInOrder; of tensors
  uint32_t rank;           // of a tensor: how many dimensions are declared (any leading ones not counted)
  uint32_t default_value;  // string: a number as a schema spells it, or ""
};
inline constexpr uint32_t kLeading = 1;  // any dimensions may come before the declared ones
inline constexpr uint32_t kMutated = 2;  // written in place
inline constexpr uint32_t kInOrder = 4;  // with kLeading: the op counts those dimensions, so their order is kept
// A tensor with leading dimensions is seen by the core with three of them in front of the declared ones.
inline constexpr uint32_t kLeadingDims = 3;

struct Config {
  uint32_t number;  // within the op; dense from 0
  uint32_t name;    // "tma_128x256x64"
  uint32_t params;  // JSON object, for explain and coverage
};

struct Bucket {
  int64_t key;
  Range candidates;
};

struct Variant {
  uint32_t kernel;  // name
  uint32_t config;  // number
  uint32_t flags;   // kGeneral, kNonDeterministic
  uint32_t reserved;
  Range constraints;
  Range locals;  // after the op's
  Expr cost;     // predicted time, picoseconds
  Range buffers;
  Range launches;
};
inline constexpr uint32_t kGeneral = 1;           // a fallback: not taken in strict mode
inline constexpr uint32_t kNonDeterministic = 2;  // not taken in deterministic mode

struct Constraint {
  Expr holds;        // may read the op's locals, not the variant's
  uint32_t message;  // what is required, for a person
};

enum class BufferKind : uint32_t {
  Scratch,   // uninitialised, stream-ordered, for this call
  Counters,  // zeroed before first use; every launch leaves it zeroed; one per stream (or graph capture)
};
struct Buffer {
  BufferKind kind;
  uint32_t alignment;
  Expr bytes;
};

struct Launch {
  uint32_t image;
  uint32_t entry;           // the kernel's symbol
  uint32_t threads;         // of a block
  uint32_t shared;          // dynamic shared memory, bytes
  uint32_t cluster;         // blocks of a cluster; grid x is multiplied by it
  uint32_t flags;           // kCooperative
  uint32_t global_scratch;  // bytes per block
  uint32_t global_scratch_alignment;
  uint32_t profile_scratch;
  uint32_t profile_scratch_alignment;
  Expr when;       // 0: skip this launch
  Expr dependent;  // not 0: programmatic stream serialization
  Expr grid[3];
  Range args;
};
inline constexpr uint32_t kCooperative = 1;

enum class ArgKind : uint32_t {
  Pointer,        // tensor `index`, plus `value` bytes
  Int,            // `value` in `width` bytes (1, 2, 4, 8); out of range makes the variant unfit
  Float,          // call.floats[index] as width 2 (fp16), 3 (bf16), 4 (fp32), 8 (fp64)
  TensorMap,      // `index` into Section::TensorMaps: 128 bytes by value. Shape and strides follow as Int args
  Buffer,         // `index`-th buffer of the variant, plus `value` bytes
  GlobalScratch,  // null when the launch has none
  ProfileScratch,
  Null,  // a null pointer
};
struct Arg {
  ArgKind kind;
  uint32_t width;
  uint32_t index;
  uint32_t reserved;
  Expr value;
};

struct TensorMap {
  uint32_t tensor;
  uint32_t rank;
  uint32_t element_type;  // CUtensorMapDataType
  uint32_t element_size;  // bytes
  uint32_t swizzle;       // CUtensorMapSwizzle
  uint32_t l2_promotion;  // CUtensorMapL2promotion
  uint32_t oob_fill;      // 0 zeros, 1 NaN
  uint32_t is_im2col;     // 1: a load takes pixels of an implicit matrix, see docs/packs.md
  uint32_t reserved;
  uint32_t box[5];  // outermost first, as in the kernel; of im2col: pixels, channels
  Expr offset;      // bytes from the tensor's data
  Expr sizes[5];    // outermost first
  Expr strides[5];  // elements; the last must be 1
  // Of im2col, for each spatial dimension, outermost first: where the first pixel lies that a tap of offset 0 reads,
  // where behind the image's last one the last of them lies, and the pixels from one to the next.
  Expr lower[3];
  Expr upper[3];
  Expr steps[3];
};

enum class ImageKind : uint32_t { Cubin, Ptx };
struct Image {
  ImageKind kind;
  uint32_t name;  // of what it was compiled from, for messages
  uint32_t frame;
  uint32_t reserved;
  uint64_t begin;  // in the unpacked frame
  uint64_t size;
  uint8_t hash[32];  // SHA-256 of the image itself
};

// Images that are alike, one after the other. It needs no hash of its own: images have one.
struct Frame {
  uint64_t offset;
  uint64_t compressed_size;  // one zstd frame that says its content's size
  uint64_t size;
};

struct Output {
  Expr dtype;
  uint32_t ndim;
  uint32_t leading;  // 1 + the tensor whose leading dimensions come first, in its order in memory; 0: there are none
  Expr sizes[8];
  Expr strides[8];
};

struct Pin {
  int64_t key;
  int64_t dims[4];
  uint32_t config;
  uint32_t reserved;
};

static_assert(sizeof(Header) == 80 + 16 * static_cast<uint32_t>(Section::Count));
static_assert(sizeof(Op) == 124 && sizeof(Config) == 12 && sizeof(Bucket) == 16 && sizeof(Variant) == 56);
static_assert(sizeof(Constraint) == 12 && sizeof(Buffer) == 16 && sizeof(Launch) == 88 && sizeof(Arg) == 24);
static_assert(sizeof(TensorMap) == 216 && sizeof(Image) == 64 && sizeof(Output) == 144 && sizeof(Pin) == 48);
static_assert(sizeof(Param) == 20 && sizeof(Frame) == 24);

// The largest frame we are ready to unpack. Builds make them of 2 MiB and one image more; the biggest seen is 0.3 MB.
inline constexpr uint64_t kMaxFrameSize = 64u << 20;

}  // namespace tk::format
