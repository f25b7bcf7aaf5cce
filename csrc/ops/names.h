// The names that hand-written ops have in torch.ops.tk. No generated op can have one of them.
#pragma once

namespace tk::ops {

void reserve_grouped_mm_names();
void reserve_conv_names();
void reserve_int4_names();
void reserve_mm_names();
void reserve_mm_plus_mm_names();
void reserve_scaled_grouped_mm_names();
void reserve_scaled_mm_names();

}  // namespace tk::ops
