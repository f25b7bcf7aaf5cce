#include "outputs.h"

#include "call_cache.h"

namespace tk {
namespace {

tk_tensor output(const Problem& problem, uint32_t index) {
  const format::Output& row = problem.pack.rows<format::Output>(problem.op.outputs)[index];
  tk_tensor tensor{};
  tensor.ndim = static_cast<int32_t>(row.ndim);
  int64_t dtype = 0;
  bool good = evaluate(problem.pack.code(row.dtype), problem.scope(), dtype) && dtype >= 0 && dtype <= INT32_MAX;
  tensor.dtype = good ? static_cast<int32_t>(dtype) : 0;
  for (uint32_t d = 0; d < row.ndim; d++) {
    good = evaluate(problem.pack.code(row.sizes[d]), problem.scope(), tensor.sizes[d]) && tensor.sizes[d] >= 0 && good;
    good = evaluate(problem.pack.code(row.strides[d]), problem.scope(), tensor.strides[d]) && tensor.strides[d] >= 0 &&
           good;
  }
  if (!good) fail(TK_INVALID_ARGUMENT, problem.text(), ": output ", index, " has no possible size");
  return tensor;
}

using Outputs = std::vector<tk_tensor>;

Outputs work_out(const tk_call& call) {
  const Problem problem(call);
  Outputs found(problem.op.outputs.count);
  for (uint32_t i = 0; i < found.size(); i++) found[i] = output(problem, i);
  return found;
}

}  // namespace

std::span<const tk_tensor> outputs(const tk_call& call) {
  auto& cache = thread_cache<CallCache<Outputs>>();
  const CallKey key(call);
  const uint64_t generation = Registry::generation();
  const Outputs* found = cache.find(key, generation);
  if (!found) [[unlikely]]
    found = cache.insert(key, generation, work_out(call));
  return *found;
}

}  // namespace tk
