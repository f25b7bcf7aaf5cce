// tk.h's tk_list_… functions as vectors.
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "tk/tk.h"

namespace tk::test {

template <class Row, class Function, class... Of>
std::vector<Row> listed(Function* function, Of... of) {
  uint32_t count = 0;
  EXPECT_EQ(function(of..., nullptr, 0, &count), TK_OK) << tk_last_error();
  std::vector<Row> rows(count);
  EXPECT_EQ(function(of..., rows.data(), count, &count), TK_OK) << tk_last_error();
  EXPECT_EQ(count, rows.size());
  return rows;
}

inline std::vector<tk_pack_info> packs() { return listed<tk_pack_info>(tk_list_packs); }
inline std::vector<tk_op_info> ops(const tk_pack* pack) { return listed<tk_op_info>(tk_list_ops, pack); }
inline std::vector<tk_config_info> configs(const tk_pack* pack, const char* op) {
  return listed<tk_config_info>(tk_list_configs, pack, op);
}
inline std::vector<tk_variant_info> variants(const tk_pack* pack, const char* op) {
  return listed<tk_variant_info>(tk_list_variants, pack, op);
}
inline std::vector<tk_constraint_info> constraints(const tk_pack* pack, const char* op) {
  return listed<tk_constraint_info>(tk_list_constraints, pack, op);
}
inline std::vector<tk_launch_info> launches(const tk_pack* pack, const char* op) {
  return listed<tk_launch_info>(tk_list_launches, pack, op);
}

}  // namespace tk::test
