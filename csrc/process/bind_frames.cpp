// Layer 4. Where another Python thread is, read in one call that lets no other thread run.
//
// Before Python 3.12 every new object may begin a garbage collection, and a destructor in it, such
// as a tensor's, lets other threads run. In `f_back` and `f_locals` that is fatal: the thread that
// is looked at leaves a frame whose address the interpreter already holds. In the list of frames,
// made under a lock that every start of a thread takes, both wait for ever (python/cpython#106883).

#include "bindings.h"

#include <frameobject.h>  // after pybind11, which takes Python.h first

#include <string>
#include <vector>

namespace loft {
namespace {

// No collection begins while it lives; nobody else can see that, as nobody else runs.
class NoCollection {
 public:
  NoCollection() : was_on_(PyGC_Disable()) {}
  ~NoCollection() {
    if (was_on_) PyGC_Enable();
  }
  NoCollection(const NoCollection&) = delete;
  NoCollection& operator=(const NoCollection&) = delete;

 private:
  int was_on_;
};

// The frames of a thread, by its number, the innermost first, at most so many; none where it has
// ended.
std::vector<py::object> stack_of(const py::int_& thread, std::size_t most) {
  const NoCollection none;
  std::vector<py::object> stack;
  const auto frames =
      py::reinterpret_steal<py::object>(PyObject_CallNoArgs(PySys_GetObject("_current_frames")));
  if (!frames) throw py::error_already_set();
  auto frame = py::reinterpret_borrow<py::object>(PyDict_GetItem(frames.ptr(), thread.ptr()));
  while (frame && stack.size() < most) {
    stack.push_back(frame);
    frame = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(
        PyFrame_GetBack(reinterpret_cast<PyFrameObject*>(frame.ptr()))));
  }
  return stack;
}

// Those of a function's variables that have these names and are set.
py::dict locals_of(const py::object& frame, const std::vector<std::string>& names) {
  const NoCollection none;
  py::dict found;
  if (!PyFrame_Check(frame.ptr())) throw py::type_error("locals_of takes a frame");
  // Of a module or a class body they would be its own dictionary.
  if (!(frame.attr("f_code").attr("co_flags").cast<int>() & CO_OPTIMIZED)) return found;
#if PY_VERSION_HEX >= 0x030C0000
  for (const std::string& name : names) {
    PyObject* value =
        PyFrame_GetVarString(reinterpret_cast<PyFrameObject*>(frame.ptr()), name.c_str());
    if (value == nullptr) {
      PyErr_Clear();
    } else {
      found[name.c_str()] = py::reinterpret_steal<py::object>(value);
    }
  }
#else
  // A copy of all variables, which stays with the frame. Left there, old values would be let go of
  // by the next look, amid its work, and live on until then.
  const py::dict all = frame.attr("f_locals");
  for (const std::string& name : names) {
    if (all.contains(name)) found[name.c_str()] = all[name.c_str()];
  }
  PyDict_Clear(all.ptr());
#endif
  return found;
}

}  // namespace

void bind_frames(py::module_& module) {
  module.def("stack_of", &stack_of, "thread"_a, "most"_a,
             "Return the frames of a thread, the innermost first.");
  module.def("locals_of", &locals_of, "frame"_a, "names"_a,
             "Return those of a frame's variables that have these names.");
}

}  // namespace loft
