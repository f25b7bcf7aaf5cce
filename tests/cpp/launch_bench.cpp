// What a repeated tk_launch costs beside the driver: a product-like call with three tensor maps, against a driver whose
// calls return at once. Prints nanoseconds.

#include <chrono>
#include <cstdio>

#include "fake_driver.h"

namespace tk::test {
namespace {

Op product() {
  const auto map = [](int tensor) {
    return tensor_map({.tensor = tensor,
                       .sizes = {size(tensor, 0), size(tensor, 1)},
                       .strides = {stride(tensor, 0), 1},
                       .box = {64, 64}});
  };
  Launch launch;
  for (const int tensor : {0, 1, 3}) {
    launch.args.push_back(map(tensor));
    for (const int d : {0, 1}) launch.args.push_back(integer(size(tensor, d)));
    for (const int d : {0, 1}) launch.args.push_back(integer(stride(tensor, d), 8));
  }
  for (const Arg& arg : {pointer(2), floating(0), floating(1), integer(int_arg(0)), integer(ndim(2) >= 0),
                         global_scratch(), profile_scratch()})
    launch.args.push_back(arg);
  launch.grid = {ceil_div(size(0, 0), 128) * ceil_div(size(1, 1), 256), 1, 1};
  launch.shared = 200000;
  Op op{.name = "product", .n_tensors = 4, .n_ints = 2, .n_floats = 2};
  op.variants = {Variant{.launches = {launch}}};
  return op;
}

double nanoseconds_per_call(const std::function<void(int)>& body, int repeats = 200000) {
  for (int i = 0; i < repeats / 10; i++) body(i);
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < repeats; i++) body(i);
  const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - begin;
  return took.count() / repeats;
}

int run() {
  FakeDriver fake;
  fake.keep_no_books();  // they are not what is measured
  const TempDir dir;
  if (tk_load_pack(dir.write("bench.tkpack", {.ops = {product()}}).c_str()) != TK_OK) {
    std::fprintf(stderr, "%s\n", tk_last_error());
    return 1;
  }
  Call call("product",
            {make_tensor({4096, 4096}), make_tensor({4096, 4096}), absent_tensor(), make_tensor({4096, 4096})}, {0, 0},
            {1.0, 0.0});
  const tk_call* const c = call.get();
  const auto launch = [&] {
    if (tk_launch(c, nullptr, nullptr) != TK_OK) std::fprintf(stderr, "%s\n", tk_last_error());
  };
  std::printf("same call, same addresses   %6.0f ns\n", nanoseconds_per_call([&](int) { launch(); }));
  std::printf("same call, output alternates %5.0f ns\n", nanoseconds_per_call([&](int i) {
                call.tensors[3].data = reinterpret_cast<void*>(uintptr_t{0x100000} * (1 + i % 2));
                launch();
              }));
  std::printf("every call another size     %6.0f ns\n", nanoseconds_per_call(
                                                            [&](int i) {
                                                              call.tensors[0].sizes[0] = 1 + i % 100000;
                                                              launch();
                                                            },
                                                            20000));
  return 0;
}

}  // namespace
}  // namespace tk::test

int main() { return tk::test::run(); }
