// moe_ext._C: the facts of the build. It links libmoe_ext.so, which registers the operators.
#include <moe_ext/build.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

// Without the GIL, too: the functions and the operators may run in several threads at once.
PYBIND11_MODULE(_C, m, pybind11::mod_gil_not_used()) {
  pybind11::options options;
  options.disable_function_signatures();  // the docstrings carry no signature
  m.doc() = "Build facts. Importing this module registers the operators in torch.ops.moe_ext.";
  m.attr("torch_version") = moe_ext::torch_version();
  m.attr("cuda_version") = moe_ext::cuda_version();
  m.attr("compiler") = moe_ext::compiler();
  m.def("empty_cache", &moe_ext::empty_cache,
        "Returns the cached memory of freed CPU tensors to the operating system.");
  m.def("cached_bytes", &moe_ext::cached_bytes,
        "Returns the bytes of freed CPU tensors that are cached.");
  m.def("cache_limit", &moe_ext::cache_limit,
        "Returns the most bytes of freed CPU tensors that are cached.");
  m.def("isa", &moe_ext::isa, "Returns the name of the instruction set that the CPU kernels use.");
  m.def("products", &moe_ext::products,
        "Returns the name of the GEMM micro-kernels on the CPU for each dtype.");
}
