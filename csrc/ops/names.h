// The names that hand-written ops have in torch.ops.tk. No generated op can have one of them.
#pragma once

namespace tk::ops {

void reserve_conv_names();
void reserve_mm_names();

}  // namespace tk::ops
