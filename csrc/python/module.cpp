// tk._native: the core's introspection (csrc/core/inspect.h) as Python objects. Choosing and loading go through the C
// API (python/tk/capi.py, python/tk/_library.py), which needs no module built for one Python.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "inspect.h"

namespace py = pybind11;
namespace inspect = tk::inspect;

PYBIND11_MODULE(_native, m) {
  m.doc() = "What is in tk's packs. Needs no GPU and no torch.";

  py::class_<inspect::Config>(m, "Config", "A named setting of a kernel; `params` is a JSON object.")
      .def_readonly("number", &inspect::Config::number)
      .def_readonly("name", &inspect::Config::name)
      .def_readonly("params", &inspect::Config::params);

  py::class_<inspect::Launch>(m, "Launch", "One launch of a variant; sizes in bytes.")
      .def_readonly("image", &inspect::Launch::image)
      .def_readonly("entry", &inspect::Launch::entry)
      .def_readonly("threads", &inspect::Launch::threads)
      .def_readonly("shared", &inspect::Launch::shared)
      .def_readonly("cluster", &inspect::Launch::cluster)
      .def_readonly("size", &inspect::Launch::size)
      .def_readonly("compressed_size", &inspect::Launch::compressed_size);

  py::class_<inspect::Variant>(m, "Variant", "A kernel at one point of its grid.")
      .def_readonly("number", &inspect::Variant::number)
      .def_readonly("kernel", &inspect::Variant::kernel)
      .def_readonly("config", &inspect::Variant::config)
      .def_readonly("config_name", &inspect::Variant::config_name)
      .def_readonly("general", &inspect::Variant::general)
      .def_readonly("deterministic", &inspect::Variant::deterministic)
      .def_readonly("constraints", &inspect::Variant::constraints)
      .def_readonly("launches", &inspect::Variant::launches);

  py::class_<inspect::Op>(m, "Op", "An op of a pack.")
      .def_readonly("name", &inspect::Op::name)
      .def_readonly("schema", &inspect::Op::schema)
      .def_readonly("n_buckets", &inspect::Op::n_buckets)
      .def_readonly("n_variants", &inspect::Op::n_variants)
      .def_readonly("n_pins", &inspect::Op::n_pins)
      .def_readonly("configs", &inspect::Op::configs);

  py::class_<inspect::Pack>(m, "Pack", "A pack; `problem` says why it cannot be used, \"\" when it can.")
      .def_readonly("path", &inspect::Pack::path)
      .def_readonly("builtin", &inspect::Pack::builtin)
      .def_readonly("problem", &inspect::Pack::problem)
      .def_readonly("arch", &inspect::Pack::arch)
      .def_readonly("ptx", &inspect::Pack::ptx)
      .def_readonly("compiler", &inspect::Pack::compiler)
      .def_readonly("hash", &inspect::Pack::hash)
      .def_readonly("file_size", &inspect::Pack::file_size)
      .def_readonly("n_images", &inspect::Pack::n_images)
      .def_readonly("ops", &inspect::Pack::ops);

  m.def("packs", &inspect::packs, "All packs that are loaded or belong to the library, whatever GPUs there are.");
  m.def("variants", &inspect::variants, py::arg("pack"), py::arg("op"),
        "The variants of an op in the pack at a path. Raises IndexError when there is none.");
  m.def("verify", &inspect::verify, py::arg("path"), py::call_guard<py::gil_scoped_release>(),
        "Holds every image of a pack against its hash; \"\" or what is wrong.");
  m.def("describe_device", &inspect::describe_device, py::arg("sm_count"), py::arg("arch"), py::arg("shared_optin"),
        py::arg("l2_bytes"), "A device number for choosing as on a GPU that this machine may not have.");
}
