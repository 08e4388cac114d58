// Layer 4. Python names of what a process does beside Python: a pulse, and its end.

#include "bindings.h"

#include <memory>
#include <string>

#include "process/grace.h"
#include "process/leave.h"
#include "process/pulse.h"

namespace loft {

void bind_process(py::module_& module) {
  // Its thread never takes Python's lock, so that holding it keeps no object from its end.
  py::class_<Pulse>(module, "Pulse",
                    "Bytes on sockets once a period, whoever holds the interpreter.")
      .def(py::init([](double period_s, const py::bytes& bytes) {
             return std::make_unique<Pulse>(period_s, std::string(bytes));
           }),
           "period_s"_a, "bytes"_a)
      .def("add", &Pulse::add, "descriptor"_a, "Begin to write to a socket.")
      .def("remove", &Pulse::remove, "descriptor"_a, "End writing to it.")
      .def("stop", &Pulse::stop, py::call_guard<py::gil_scoped_release>(),
           "End the thread; can be called again.");
  // Its thread does not take Python's lock either: it ends processes that hold that for ever.
  module.def(
      "leave_in", &leave_in, "seconds"_a, "why"_a,
      "Leave the process with status 1 after so many seconds, whoever holds the interpreter.");
  module.def(
      "add_grace", &add_grace, "descriptor"_a, "seconds"_a,
      "Let SIGTERM write to a socket at once, and end the process so many seconds later; False "
      "where it does not take its default action.");
  module.def("since_sigterm_s", &since_sigterm_s,
             "Return the seconds since SIGTERM gave this process its last ones, or -1.");
  module.def("remove_grace", &remove_grace, "descriptor"_a,
             "End writing to it; after the last one SIGTERM ends the process at once.");
}

}  // namespace loft
