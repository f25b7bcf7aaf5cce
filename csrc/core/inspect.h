// What is in the packs, as tk.h tells it. Nothing here is fast.
#pragma once

#include <string>
#include <vector>

#include "pack.h"

namespace tk::inspect {

std::vector<tk_pack_info> packs();

// Throw TK_INVALID_ARGUMENT for a pack that packs() did not give out, or an op that it does not have.
std::vector<tk_op_info> ops(const tk_pack* pack);
std::vector<tk_config_info> configs(const tk_pack* pack, const char* op);
std::vector<tk_variant_info> variants(const tk_pack* pack, const char* op);
std::vector<tk_constraint_info> constraints(const tk_pack* pack, const char* op);
std::vector<tk_launch_info> launches(const tk_pack* pack, const char* op);

// Of a variant, as tk_list_launches tells it.
tk_launch_info describe(const Pack& pack, uint32_t variant, const format::Launch& launch);

// How many images the file has, all of them whole. Throws TK_PACK_ERROR.
uint32_t verify(const std::string& path);

}  // namespace tk::inspect
