/* The C API of libtk_core: open packs, choose a kernel, launch it. No torch, no Python, no CUDA headers.
 *
 * Every function may be called from any thread. A function that returns tk_status leaves a message for a person in
 * tk_last_error(), per thread, until the next call of that thread fails. No call leaves the CUDA context unusable.
 */
#ifndef TK_TK_H
#define TK_TK_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TK_API __attribute__((visibility("default")))

/* Bumped whenever a struct or function below changes its meaning. */
#define TK_ABI_VERSION 2

#define TK_MAX_DIMS 8
#define TK_MAX_TENSORS 32
#define TK_MAX_INTS 32
#define TK_MAX_FLOATS 448

typedef enum tk_status {
  TK_OK = 0,
  TK_INVALID_ARGUMENT = 1,  /* the caller's mistake: a shape, a dtype, a config that does not fit */
  TK_UNSUPPORTED = 2,       /* this GPU, driver or situation cannot run it (graph capture before preload, …) */
  TK_VARIANT_NOT_FOUND = 3, /* no loaded pack holds a kernel for this problem */
  TK_PACK_ERROR = 4,        /* a pack is missing, damaged, of another version, or clashes with a loaded one */
  TK_DRIVER_ERROR = 5,      /* the CUDA driver refused a call; the message names the call and the driver's reason */
} tk_status;

/* dtype numbers are torch's ScalarType: uint8 0, int8 1, int16 2, int32 3, int64 4, float16 5, float32 6, float64 7,
 * bool 11, bfloat16 15, float8_e5m2 23, float8_e4m3fn 24. */

/* Strides count elements. An absent optional tensor has ndim -1. */
typedef struct tk_tensor {
  void* data;
  int64_t sizes[TK_MAX_DIMS];
  int64_t strides[TK_MAX_DIMS];
  int32_t dtype;
  int32_t ndim;
} tk_tensor;

/* What a caller asks of the choice; bits of tk_call.mode, visible to a pack's expressions. */
enum {
  TK_MODE_DETERMINISTIC = 1,   /* only variants that give the same bits on every call */
  TK_MODE_BATCH_INVARIANT = 2, /* a row's result does not depend on how many rows came with it */
  TK_MODE_STRICT = 4,          /* no general-purpose fallback: TK_VARIANT_NOT_FOUND instead of a slow kernel */
  TK_MODE_STATIC_WEIGHTS = 8,  /* nothing queued on the stream writes the weights: they may be read early */
};

typedef uint32_t tk_op; /* a number that stands for an op's name in this process */

typedef struct tk_call {
  tk_op op;
  uint32_t mode;
  int32_t config; /* the config's number within the op, or -1: choose */
  int32_t device; /* CUDA ordinal */
  uint32_t n_tensors;
  uint32_t n_ints;
  uint32_t n_floats;
  const tk_tensor* tensors;
  const int64_t* ints;
  const double* floats;
} tk_call;

/* Where scratch memory comes from: stream-ordered, so that `release` right after the launch is safe.
 * NULL in tk_launch means the driver's own stream-ordered allocator. */
typedef struct tk_allocator {
  void* context;
  void* (*allocate)(void* context, size_t bytes, size_t alignment, int32_t device, void* stream);
  void (*release)(void* context, void* pointer, int32_t device, void* stream);
} tk_allocator;

/* Names are valid for as long as the process lives. */
typedef struct tk_choice {
  int32_t config;
  uint32_t variant; /* number of the variant in its pack */
  int64_t cost;     /* predicted time, picoseconds; -1 when the config was given or pinned */
  int32_t pinned;   /* 1: measured for exactly this problem, 0: predicted, 2: given by the caller */
  uint32_t n_launches;
  const char* config_name;
  const char* kernel_name;
  const char* pack_path; /* the pack that serves the call */
} tk_choice;

/* Why a candidate was not taken: one row per candidate of the problem's bucket, in the pack's order. */
typedef struct tk_candidate {
  uint32_t variant;
  int32_t config;
  int64_t cost; /* predicted picoseconds; -1 when a constraint fails */
  const char* config_name;
  const char* kernel_name;
  const char* failed_constraint; /* NULL: it could run */
} tk_candidate;

TK_API const char* tk_last_error(void);
TK_API uint32_t tk_abi_version(void);

/* --- Packs --- */

/* The folder of the packs that belong to this library (roots.inc has their hashes). A device's pack is opened when the
 * device is first used. A library built without roots takes packs from there only if TK_UNROOTED_PACKS=1 is set. */
TK_API tk_status tk_set_builtin_directory(const char* path);
/* A folder of packs of this library's kernels for more GPUs, as an add-on package brings them: sm100.tkpack. Each is
 * opened, and checked as a whole, when a device first needs it. It is an error where the folder has no pack, or one for
 * an architecture that this library has a pack for. */
TK_API tk_status tk_add_pack_directory(const char* path);
/* Another pack, checked at once. Loading the same one again does nothing. Of one that was built for several
 * architectures the name without these, my.tkpack, stands for my.sm80.tkpack, my.sm90.tkpack and so on, where there is
 * no file of that name: all are loaded, and the GPU of a call decides. */
TK_API tk_status tk_load_pack(const char* path);

/* --- Generated ops: those whose packs say what they take and return --- */

/* How many of them a process can have: a library that registers them with torch has a function ready for each. */
#define TK_MAX_GENERATED_OPS 512

typedef enum tk_param_kind {
  TK_PARAM_TENSOR = 0,
  TK_PARAM_TENSORS = 1, /* a list */
  TK_PARAM_FLOAT = 2,
  TK_PARAM_INT = 3,
  TK_PARAM_BOOL = 4,
  TK_PARAM_OPTIONAL_TENSOR = 5, /* a tensor, or none: the call then has it absent (ndim -1) */
} tk_param_kind;

/* An argument. The tensors of a call are the tensor params in order, then the outputs; its ints are the int and bool
 * params, its floats the float params. The tensors of an op are all lists or none; docs/packs.md says how lists are
 * passed. */
typedef struct tk_param {
  const char* name;
  tk_param_kind kind;
  int32_t leading; /* of a tensor, or of each in a list: 1 when any dimensions may come before the declared ones, the
                      same for all that do; 2 when the core must see them in their order, whatever their strides */
  int32_t mutated; /* of a tensor: 1 when it is written in place */
  uint32_t rank;   /* of a tensor: how many dimensions are declared */
  const char* default_value; /* as a schema spells it; "" when there is none */
} tk_param;

/* Words of an expression (docs/packs.md); none are the constant 0. */
typedef struct tk_code {
  const int64_t* words;
  size_t count;
} tk_code;

/* A constraint on the arguments: not 0, or the call is wrong. */
typedef struct tk_check {
  tk_code holds;
  const char* message;
} tk_check;

/* What is returned: dtype, and sizes and strides of the declared dimensions. leading: the tensor whose leading
 * dimensions come first, in their order in memory; -1: none do. */
typedef struct tk_result {
  tk_code dtype;
  int32_t leading;
  uint32_t ndim;
  tk_code sizes[TK_MAX_DIMS];
  tk_code strides[TK_MAX_DIMS];
} tk_result;

typedef struct tk_generated_op {
  tk_op op;
  const char* name;
  const char* schema; /* "scaled_gelu(Tensor x, float alpha, int config=-1, int mode=0) -> Tensor" */
  const char* meta;   /* JSON: the recorded graph and more; docs/packs.md */
  /* The op that works out its gradients; "" when there is none. Then there is a twin of the op, to be registered
   * without autograd, that returns all of `results`; the op itself leaves out the last n_saved. */
  const char* backward;
  const char* twin_schema;
  const char* pack_path;
  uint32_t n_params;
  uint32_t n_locals;
  uint32_t n_checks;
  uint32_t n_results;
  uint32_t n_saved;
  const tk_param* params;
  const tk_code* locals;
  const tk_check* checks;
  const tk_result* results;
} tk_generated_op;

/* The index-th generated op of all packs that were loaded, in the order in which they came; NULL past the last. An op
 * of several packs comes once, as the first of them has it. The record stays where it is. */
TK_API const tk_generated_op* tk_generated_op_at(uint32_t index);
/* Keeps a name for an op that a library registers itself: a pack that has a generated op of this name is refused. */
TK_API tk_status tk_reserve_op(const char* name);

/* --- Ops --- */

TK_API tk_op tk_intern_op(const char* name); /* never fails; the op need not be loaded yet */
TK_API const char* tk_op_name(tk_op op);

/* Fills *choice without touching the GPU beyond reading the device's attributes. */
TK_API tk_status tk_choose(const tk_call* call, tk_choice* choice);
/* At most `capacity` rows; *count is how many there are. */
TK_API tk_status tk_candidates(const tk_call* call, tk_candidate* rows, uint32_t capacity, uint32_t* count);
/* How to allocate what a generated op returns: sizes, strides, dtype and ndim of each output, data NULL. The call has
 * its output tensors absent (ndim -1). At most `capacity` rows; *count is how many there are. Checks the arguments
 * first. A repeated call costs what tk_launch's choice does. */
TK_API tk_status tk_outputs(const tk_call* call, tk_tensor* rows, uint32_t capacity, uint32_t* count);
TK_API tk_status tk_launch(const tk_call* call, void* stream, const tk_allocator* allocator);

/* Load every module of an op on a device now (op UINT32_MAX: of all ops). *modules, unless NULL: how many it has. */
TK_API tk_status tk_preload(tk_op op, int32_t device, uint32_t* modules);

/* Which capture of a CUDA graph a stream takes part in: an id that no other capture of this process has, 0 for none.
 * The stream's context must be current. Fails where the capture has failed already. */
TK_API tk_status tk_capture_id(void* stream, uint64_t* id);

/* A measured choice for one problem: for the call's bucket and exactly its size (the op's `dims`, see docs/packs.md).
 * Overrides what the pack holds; config -1 removes it. In batch-invariant mode no measured choice counts. */
TK_API tk_status tk_pin(const tk_call* call, int32_t config);

/* A device number to put into tk_call for choosing (not launching) as on a GPU that this machine may not have. arch: 90
 * for 9.0. shared_optin: the most shared memory of a block, bytes. The same description has the same number; there can
 * be 64 of them. */
TK_API tk_status tk_describe_device(int64_t sm_count, int64_t arch, int64_t shared_optin, int64_t l2_bytes,
                                    int32_t* device);

/* The compute capability of a device, or of one that is described: 90 for 9.0. */
TK_API tk_status tk_device_arch(int32_t device, int64_t* arch);

/* --- What is in the packs, for people and tools. Each fills at most `capacity` rows; *count is how many there are.
 * Texts and packs are valid for as long as the process lives. --- */

typedef struct tk_pack tk_pack; /* one that is open */

typedef struct tk_pack_info {
  const tk_pack* pack; /* NULL: it cannot be used */
  const char* path;
  const char* problem;  /* why it cannot be used, else NULL. What follows `builtin` is then 0 */
  int32_t builtin;      /* 1: it belongs to the library */
  uint32_t arch;        /* 90 for 9.0; for PTX the oldest GPU it serves */
  int32_t ptx;          /* 1: PTX, 0: cubins */
  uint32_t n_images;    /* of which several variants may launch one */
  int32_t family;       /* 1: cubins for a family, sm_100f, which run on newer GPUs of 10.x too */
  uint64_t file_size;   /* bytes */
  const char* compiler; /* what made the images */
  const char* hash;     /* SHA-256 of the index, hexadecimal */
} tk_pack_info;

typedef struct tk_op_info {
  const char* name;
  const char* schema; /* "" where a library registers the op */
  uint32_t n_tensors;
  uint32_t n_ints;
  uint32_t n_floats;
  uint32_t n_outputs;
  uint32_t n_buckets;
  uint32_t n_configs;
  uint32_t n_variants;
  uint32_t n_pins;
  const char* served_by; /* the pack, loaded earlier, that serves this op where it has a kernel; NULL: this one does */
} tk_op_info;

typedef struct tk_config_info {
  uint32_t number; /* within the op, of the pack that serves a call */
  const char* name;
  const char* params; /* a JSON object */
} tk_config_info;

/* A kernel at one point of its grid. */
typedef struct tk_variant_info {
  uint32_t number; /* in its pack, as in tk_choice */
  uint32_t config; /* the config's number */
  const char* config_name;
  const char* kernel;
  int32_t general;       /* 1: serves what nothing better takes */
  int32_t deterministic; /* 1: the same bits on every call */
} tk_variant_info;

typedef struct tk_constraint_info {
  uint32_t variant;    /* whose it is */
  const char* message; /* completes "this variant needs ..." */
} tk_constraint_info;

typedef struct tk_launch_info {
  uint32_t variant;         /* whose it is; a variant's launches stand in their order */
  uint32_t threads;         /* of a block */
  uint32_t shared;          /* dynamic shared memory of a block, bytes */
  uint32_t cluster;         /* blocks */
  uint64_t size;            /* of the cubin or PTX, bytes */
  uint64_t compressed_size; /* its share of the frame that it is compressed in */
  const char* image;        /* what it was compiled from */
  const char* entry;        /* the function in it */
} tk_launch_info;

/* All packs that are loaded or belong to the library, whatever GPUs there are. */
TK_API tk_status tk_list_packs(tk_pack_info* rows, uint32_t capacity, uint32_t* count);
TK_API tk_status tk_list_ops(const tk_pack* pack, tk_op_info* rows, uint32_t capacity, uint32_t* count);
/* Of one op of a pack, by its name; constraints and launches in the order of the variants. */
TK_API tk_status tk_list_configs(const tk_pack* pack, const char* op, tk_config_info* rows, uint32_t capacity,
                                 uint32_t* count);
TK_API tk_status tk_list_variants(const tk_pack* pack, const char* op, tk_variant_info* rows, uint32_t capacity,
                                  uint32_t* count);
TK_API tk_status tk_list_constraints(const tk_pack* pack, const char* op, tk_constraint_info* rows, uint32_t capacity,
                                     uint32_t* count);
TK_API tk_status tk_list_launches(const tk_pack* pack, const char* op, tk_launch_info* rows, uint32_t capacity,
                                  uint32_t* count);
/* What tk_launch launches of a call, in order: of the variant that tk_choose takes, the launches that have something to
 * do. At most `capacity` rows; *count is how many there are, as tk_choice.n_launches. */
TK_API tk_status tk_launches(const tk_call* call, tk_launch_info* rows, uint32_t capacity, uint32_t* count);

/* Unpacks every image of a file, loaded or not, and holds it and the index against their hashes. *images, unless NULL:
 * how many there are. */
TK_API tk_status tk_verify_pack(const char* path, uint32_t* images);

#ifdef __cplusplus
}
#endif
#endif
