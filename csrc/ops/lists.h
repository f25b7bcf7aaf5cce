// Generated ops over lists of tensors: every tensor of its own size, all of them in one launch.
//
// The kernels read a table in device memory, of 64-bit words in columns of one word for each place in the lists: in
// which chunk of kListChunk elements the tensors of a place begin, how many elements they have, then the address of
// each list's tensor, those of results last. Another kernel, store_table, writes the table, out of its own parameters:
// so it comes in the order of the stream, and a captured graph holds it, as neither is true of a copy from the host.
//
// The core sees each list as one tensor: the table's address, sizes [places, chunks], and as first stride 16 where all
// of the list's tensors lie on 16 bytes, else 1. What all places share, and a result that is no list, is a tensor.
#pragma once

#include <torch/csrc/stable/library.h>

#include "tk/tk.h"

namespace tk::ops {

inline constexpr int64_t kListChunk = 4096;             // python/tk/codegen/scheduling/lists.py
inline constexpr int64_t kStoredWords = TK_MAX_FLOATS;  // of a launch of store_table: kernels/lists/table.py

// A boxed call of an op whose tensors are lists.
void call_lists(const tk_generated_op& op, StableIValue* stack);

}  // namespace tk::ops
