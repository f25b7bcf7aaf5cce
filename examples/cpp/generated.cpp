// A generated op from C++: `generated PACK`, of a pack with twice(x[...]) -> 2 x. Without a GPU it is found, not
// run.
#include <tk/ops.h>
#include <torch/torch.h>

#include <cstdio>
#include <exception>

int main(int argc, char** argv) try {
  if (argc != 2) throw std::runtime_error("usage: generated PACK");
  tk::load_pack(argv[1]);
  const auto twice = tk::generated<at::Tensor(const at::Tensor& x, int64_t config, int64_t mode)>("twice");
  std::printf("%s\n", toString(twice.schema()).c_str());
  if (!torch::cuda::is_available()) return 0;

  const torch::InferenceMode guard;
  const auto x = torch::randn({2, 3, 5}, torch::kCUDA);
  return torch::equal(twice.call(x, -1, 0), 2 * x) ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
