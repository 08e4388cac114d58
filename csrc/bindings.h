// Layer 4. What binding files share. Only they know Python: each room's adds its names to the
// module
// `_loft`, checks nothing that the C++ checks, and does no arithmetic.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

namespace loft {

namespace py = pybind11;
using namespace py::literals;  // "rows"_a names an argument

void bind_frames(py::module_& module);   // process/bind_frames.cpp
void bind_process(py::module_& module);  // process/bind_process.cpp
void bind_shares(py::module_& module);   // shares/bind_shares.cpp
void bind_wire(py::module_& module);     // wire/bind_wire.cpp

// Without the interpreter's lock. The interpreter's end unwinds a thread that asks for it again,
// which ends the process where a destructor may not throw, as that of py::gil_scoped_release.
class Unlocked {
 public:
  Unlocked() : state_(PyEval_SaveThread()) {}
  ~Unlocked() noexcept(false) { PyEval_RestoreThread(state_); }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  PyThreadState* state_;
};

}  // namespace loft
