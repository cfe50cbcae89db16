// The module dpkernels._native: loading it registers the CPU kernels with torch's dispatcher. What it holds
// itself is for `dpkernels info` and for tests: how it was built, which instruction set runs, the pool of memory.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>

#include "cpu/isa.h"
#include "cpu/normals.h"
#include "cpu/pool.h"
#include "cpu/torch_memory.h"

#define DPK_TEXT_OF(x) #x
#define DPK_TEXT(x) DPK_TEXT_OF(x)

namespace {

pybind11::array_t<float> normals(int64_t key, int64_t release, uint64_t first_group, int64_t groups) {
  pybind11::array_t<float> out(groups * dpk::group_elements);
  const dpk::Stream stream{static_cast<uint64_t>(key), static_cast<uint64_t>(release)};
  dpk::random_kernels().normals(out.mutable_data(), groups, first_group, stream);
  return out;
}

dpk::SecureStream secure_stream(const std::array<int64_t, 4>& key, int64_t release) {
  return dpk::secure_stream(key.data(), release);
}

pybind11::array_t<double> secure_normals(const std::array<int64_t, 4>& key, int64_t release, uint64_t first_group,
                                         int64_t groups) {
  pybind11::array_t<double> out(groups * dpk::group_elements);
  dpk::secure_kernels().normals(out.mutable_data(), groups, first_group, secure_stream(key, release));
  return out;
}

pybind11::array_t<uint32_t> chacha20(const std::array<int64_t, 4>& key, int64_t release, uint32_t purpose,
                                     uint64_t first_block, int64_t blocks) {
  pybind11::array_t<uint32_t> out({blocks, int64_t{dpk::chacha20_words}});
  dpk::secure_kernels().words(out.mutable_data(), blocks, first_block, secure_stream(key, release),
                              static_cast<dpk::Purpose>(purpose));
  return out;
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  m.doc() = "dpkernels' CPU kernels";
  m.attr("compiler") = "C++ compiler " __VERSION__;
  m.attr("torch_target_version") = DPK_TEXT(TORCH_TARGET_VERSION);
  m.def("available_isas", &dpk::available_isas, "Instruction sets that this build has and this CPU runs.");
  m.def("active_isa", [] { return dpk::isa_name(dpk::active_isa()); }, "The instruction set in use.");
  m.def("is_amd", &dpk::is_amd, "Whether this is a CPU of AMD.");
  m.def("use_isa", &dpk::use_isa, pybind11::arg("name"), "Switch to another available instruction set.");
  m.def("pool_bytes", &dpk::pool_bytes, "Memory kept for large tensors of later steps.");
  m.def("empty_pool", &dpk::empty_pool, "Give that memory back to the system.");
  m.def("serve_torch", &dpk::serve_torch, pybind11::arg("torch_version"),
        "Have torch take the memory of large CPU tensors from the pool; whether it does.");
  m.def("normals", &normals, pybind11::arg("key"), pybind11::arg("release"), pybind11::arg("first_group"),
        pybind11::arg("groups"), "The standard normals of groups of 64 elements of a release.");
  m.def("secure_normals", &secure_normals, pybind11::arg("key"), pybind11::arg("release"), pybind11::arg("first_group"),
        pybind11::arg("groups"), "The same of a secure release, in double precision.");
  m.def("chacha20", &chacha20, pybind11::arg("key"), pybind11::arg("release"), pybind11::arg("purpose"),
        pybind11::arg("first_block"), pybind11::arg("blocks"), "The words of ChaCha20 blocks, sixteen each.");
}
