// The interface of a generated op: its schema, as torch spells it, from the records of its arguments and outputs.
#pragma once

#include <string>
#include <string_view>

#include "pack.h"

namespace tk {

// Every mutated argument has a letter of its own in the schema.
inline constexpr uint32_t kMaxMutated = 26;

// "scaled_gelu(Tensor x, Tensor bias, float alpha, int config=-1, int mode=0) -> Tensor". Of an op that writes in place
// the last argument is called mode_bits. Takes verified records.
std::string schema_of(const Pack& pack, const format::Op& op);
// Of its twin without autograd, which returns what is saved for the gradients too: "_scaled_gelu(…) -> (Tensor,
// Tensor)".
std::string twin_schema_of(const Pack& pack, const format::Op& op);

// A letter or _, then letters, digits and _.
bool is_identifier(std::string_view name);
// What every op takes beyond its own arguments.
bool is_reserved_argument(std::string_view name);
// Whether a default is spelled as a schema spells one of its kind: "" (there is none), 3, -1.5e-06, True, None.
bool is_default(format::ParamKind kind, std::string_view text);

// Whether two packs mean the same op by one name, so that kernels of either serve it.
bool same_interface(const Pack& a, const format::Op& x, const Pack& b, const format::Op& y);

}  // namespace tk
