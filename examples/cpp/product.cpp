// relu(a @ b + bias) from C++: through tk on the GPU when there is one, through its reference on the CPU otherwise.
#include <tk/ops.h>
#include <torch/torch.h>

#include <cstdio>
#include <exception>

int main(int argc, char** argv) try {
  for (int i = 1; i < argc; ++i) tk::load_pack(argv[i]);  // kernels beyond those that come with tk

  const bool gpu = torch::cuda::is_available();
  const auto options = torch::dtype(torch::kBFloat16).device(gpu ? torch::kCUDA : torch::kCPU);
  torch::manual_seed(0);
  const auto a = torch::randn({512, 1024}, options);
  const auto b = torch::randn({1024, 256}, options);
  const auto bias = torch::randn({256}, options);

  const torch::InferenceMode guard;  // tk's gradients are registered from Python
  const auto ours = tk::mm(a, b, bias, {.activation = tk::Activation::Relu});
  const auto exact = torch::relu(torch::addmm(bias.to(torch::kFloat64), a.to(torch::kFloat64), b.to(torch::kFloat64)));

  const double error = ((ours - exact).abs().max() / exact.abs().max()).item<double>();
  std::printf("tk::mm on the %s: [%ld, %ld], largest error %.2e of the largest value\n", gpu ? "GPU" : "CPU",
              static_cast<long>(ours.size(0)), static_cast<long>(ours.size(1)), error);
  return error < 1e-2 ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
