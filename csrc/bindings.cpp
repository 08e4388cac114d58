// Layer 4. Python names of the C++ API; releases the GIL, checks nothing that the API checks, and
// does no arithmetic. Rows and results are addresses: Python keeps their owners alive.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <frameobject.h>  // after pybind11, which takes Python.h first

#include <sys/mman.h>

#include <cstring>

#include "aggregate.h"
#include "levels.h"
#include "process/grace.h"
#include "process/leave.h"
#include "process/pulse.h"
#include "shares/shares.h"
#include "wire/mailboxes.h"
#include "wire/messages.h"

namespace py = pybind11;
using namespace py::literals;  // "rows"_a names an argument

namespace {

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

// Where another Python thread is, read in one call that lets no other thread run.
//
// Before Python 3.12 every new object may begin a garbage collection, and a destructor in it, such
// as a tensor's, lets other threads run. In `f_back` and `f_locals` that is fatal: the thread that
// is looked at leaves a frame whose address the interpreter already holds. In the list of frames,
// made under a lock that every start of a thread takes, both wait for ever (python/cpython#106883).

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

// A job of Python's numbers: `rows` and `out` are addresses of numel values of the dtype, which and
// the rule are codes of rules.h. Codes become enumerations here, so they are checked here; whatever
// else is wrong with a job, the API says.
loft::Job job_of(const std::vector<uintptr_t>& rows, int64_t numel, int dtype, int rule, int kind,
                 int f, std::vector<int32_t> weights, uintptr_t out) {
  if (dtype < 0 || dtype > 3 || rule < 0 || rule >= loft::kNumRules || kind < 0 || kind > 2) {
    throw std::invalid_argument("dtype, rule or kind is not a code of rules.h");
  }
  loft::Job job;
  for (uintptr_t row : rows) job.rows.push_back(reinterpret_cast<const void*>(row));
  job.numel = numel;
  job.dtype = static_cast<loft::DType>(dtype);
  job.params = {static_cast<loft::Rule>(rule), static_cast<loft::MedianKind>(kind), f};
  job.weights = std::move(weights);
  job.out = reinterpret_cast<void*>(out);
  return job;
}

// Addresses of int64 arrays; 0 is null.
const int64_t* counts_at(uintptr_t address) { return reinterpret_cast<const int64_t*>(address); }
int64_t* numbers_at(uintptr_t address) { return reinterpret_cast<int64_t*>(address); }

// What was found of (coordinates, num_outside, num_non_finite, squared_distance), or None.
py::object found_in(const loft::Diagnostics& diagnostics, int diagnose_every) {
  if (diagnose_every <= 0) return py::none();
  return py::make_tuple(diagnostics.coordinates, diagnostics.num_outside,
                        diagnostics.num_non_finite, diagnostics.squared_distance);
}

#if defined(LOFT_HAVE_CUDA)
// Where to queue: `stream` is torch's raw stream, 0 the default one. `low`, `high` and `sums` are
// addresses on the device, of the windows and sums of diagnostics; with diagnose_every = 0 unused.
loft::CudaOptions cuda_options(int device, uintptr_t stream, int diagnose_every, uintptr_t low,
                               uintptr_t high, uintptr_t sums) {
  loft::CudaOptions options{device, reinterpret_cast<void*>(stream), {}};
  if (diagnose_every > 0) {
    options.diagnostics = {reinterpret_cast<void*>(low), reinterpret_cast<void*>(high),
                           reinterpret_cast<double*>(sums), diagnose_every};
  }
  return options;
}
#endif

}  // namespace

PYBIND11_MODULE(_loft, module) {
  module.doc() =
      "Coordinate-wise robust aggregation of rows, and shares of samples, given by their "
      "addresses.";
  module.attr("has_cuda") = false;
  module.attr("block") = loft::kBlock;  // BLOCK in loft_hvd/aggregation/fallback.py
  module.attr("built_levels") = loft::isa_levels(true);
  module.def("isa_levels", &loft::isa_levels, "all"_a = false,
             "Instruction sets that run here, or all that were built; the best last.");
  // Rules that see coordinates. Every function below takes its arguments by value and gives up the
  // interpreter's lock for the work: other threads of Python run meanwhile.
  module.def(
      "aggregate_cpu",
      [](const std::vector<uintptr_t>& rows, int64_t numel, int dtype, int rule, int kind, int f,
         std::vector<int32_t> weights, uintptr_t out, int threads, const std::string& isa,
         int diagnose_every) -> py::object {
        const loft::Job job = job_of(rows, numel, dtype, rule, kind, f, std::move(weights), out);
        loft::Diagnostics diagnostics;
        loft::CpuOptions options{threads, isa, nullptr, diagnose_every};
        if (diagnose_every > 0) options.diagnostics = &diagnostics;
        {
          const Unlocked release;
          loft::aggregate_cpu(job, options);
        }
        return found_in(diagnostics, diagnose_every);
      },
      "rows"_a, "numel"_a, "dtype"_a, "rule"_a, "kind"_a, "f"_a, "weights"_a, "out"_a, "threads"_a,
      "isa"_a, "diagnose_every"_a,
      "Aggregate rows into out. With diagnose_every > 0, look at one block of so many and return "
      "(coordinates, num_outside, num_non_finite, squared_distance), the last three one a row.");
  // Rules that see rows: a table of distances, from which Python computes a matrix, and sums of
  // rows by that matrix with a rule over them.
  module.def(
      "distances_cpu",
      [](const std::vector<uintptr_t>& rows, int64_t numel, int dtype, uintptr_t table, int threads,
         const std::string& isa) {
        const loft::Job job = job_of(rows, numel, dtype, 0, 0, 0, {}, 0);
        const Unlocked release;
        loft::distances_cpu(job, {threads, isa, nullptr, 0}, reinterpret_cast<double*>(table));
      },
      "rows"_a, "numel"_a, "dtype"_a, "table"_a, "threads"_a, "isa"_a,
      "Fill the part above the diagonal of a float64 table, [rows + 1, rows + 1], with squared "
      "distances between rows and, in the last column, from zero.");
  module.def(
      "mix_cpu",
      [](const std::vector<uintptr_t>& rows, int64_t numel, int dtype, std::vector<double> scales,
         std::vector<double> matrix, int num_mixed, int rule, int kind, int f,
         std::vector<int32_t> weights, uintptr_t out, int threads, const std::string& isa,
         int diagnose_every) -> py::object {
        const loft::Job job = job_of(rows, numel, dtype, rule, kind, f, std::move(weights), out);
        loft::Diagnostics diagnostics;
        loft::CpuOptions options{threads, isa, nullptr, diagnose_every};
        if (diagnose_every > 0) options.diagnostics = &diagnostics;
        {
          const Unlocked release;
          loft::mix_cpu(job, {num_mixed, std::move(scales), std::move(matrix)}, options);
        }
        return found_in(diagnostics, diagnose_every);
      },
      "rows"_a, "numel"_a, "dtype"_a, "scales"_a, "matrix"_a, "num_mixed"_a, "rule"_a, "kind"_a,
      "f"_a, "weights"_a, "out"_a, "threads"_a, "isa"_a, "diagnose_every"_a,
      "Aggregate mixed rows, sums of rows by the weights of a matrix [num_mixed, rows], into out; "
      "weights are theirs. With diagnose_every as aggregate_cpu, of the given rows.");
  // Averages over time.
  module.def(
      "absorb_cpu",
      [](uintptr_t gradient, uintptr_t average, uintptr_t out, int64_t numel, int dtype,
         double gain, double keep, int threads, const std::string& isa) {
        const loft::AverageUpdate what{reinterpret_cast<const void*>(gradient),
                                       reinterpret_cast<void*>(average),
                                       reinterpret_cast<void*>(out),
                                       numel,
                                       static_cast<loft::DType>(dtype),
                                       gain,
                                       keep};
        const Unlocked release;
        return loft::absorb_cpu(what, {threads, isa, nullptr, 0});
      },
      "gradient"_a, "average"_a, "out"_a, "numel"_a, "dtype"_a, "gain"_a, "keep"_a, "threads"_a,
      "isa"_a,
      "Write gain * gradient + keep * average to out, and to average unless a value is not finite; "
      "say whether it has. A gradient at 0 is zeros.");
  // What a rule is measured against: each row read once, one result written.
  module.def(
      "pass_cpu",
      [](const std::vector<uintptr_t>& rows, int64_t numel, uintptr_t out, int threads,
         const std::string& isa, bool in_bursts) {
        const loft::Job job = job_of(rows, numel, 1, 0, 0, 0, {}, out);
        const Unlocked release;
        loft::pass_cpu(job, {threads, isa, nullptr, 0}, in_bursts);
      },
      "rows"_a, "numel"_a, "out"_a, "threads"_a, "isa"_a, "in_bursts"_a,
      "Sum float32 rows in row order: the memory pass of the benchmarks.");
  // Values in fewer bytes, for links slower than memory.
  module.def(
      "compact_room",
      [](int64_t count, int dtype) {
        return loft::compact_room(count, static_cast<loft::DType>(dtype));
      },
      "count"_a, "dtype"_a, "How many bytes compact_cpu may write for so many values.");
  module.def(
      "compact_cpu",
      [](uintptr_t values, int64_t count, int dtype, uintptr_t out, const std::string& isa) {
        const Unlocked release;
        return loft::compact_cpu(reinterpret_cast<const void*>(values), count,
                                 static_cast<loft::DType>(dtype), reinterpret_cast<void*>(out),
                                 isa);
      },
      "values"_a, "count"_a, "dtype"_a, "out"_a, "isa"_a,
      "Write a message of float32, float16 or bfloat16 values into out; return its bytes.");
  module.def(
      "expand_cpu",
      [](uintptr_t from, int64_t room, uintptr_t values, int64_t count, int dtype,
         const std::string& isa) {
        const Unlocked release;
        return loft::expand_cpu(reinterpret_cast<const void*>(from), room,
                                reinterpret_cast<void*>(values), count,
                                static_cast<loft::DType>(dtype), isa);
      },
      "from"_a, "room"_a, "values"_a, "count"_a, "dtype"_a, "isa"_a,
      "Read the values of such a message, bit for bit; False where it is none.");
  // Memory that processes share, by address. The interpreter's lock keeps threads apart here, and
  // no signal's handler runs within a call.
  py::class_<loft::Mailboxes>(module, "Mailboxes", "Messages between processes that share memory.")
      .def(py::init<std::vector<uintptr_t>, int, uint64_t, uint64_t>(), "heads"_a, "rank"_a,
           "num_bytes"_a, "capacity"_a)
      .def_static("head_bytes", &loft::Mailboxes::head_bytes, "num_ranks"_a, "capacity"_a,
                  "Return how much of a memory is boxes.")
      .def("post", &loft::Mailboxes::post, "series"_a, "tag"_a, "places"_a, "num_bytes"_a,
           "Tell each other rank where values for it lie; return the exchange's number.")
      .def("has_all", &loft::Mailboxes::has_all, "tag"_a, "number"_a,
           "Say whether the values of all other ranks lie ready.")
      .def(
          "read",
          [](loft::Mailboxes& boxes, int peer, uint64_t tag, uint64_t number, uintptr_t memory,
             uintptr_t target, uint64_t num_bytes) {
            const uint64_t place = boxes.take_place(peer, tag, number, num_bytes);
            {
              const Unlocked release;
              std::memcpy(reinterpret_cast<void*>(target),
                          reinterpret_cast<const void*>(memory + place), num_bytes);
            }
            boxes.has_read(peer);
          },
          "peer"_a, "tag"_a, "number"_a, "memory"_a, "target"_a, "num_bytes"_a,
          "Copy a rank's values out of its memory.")
      .def("end", &loft::Mailboxes::end, "series"_a,
           "Forget what was sent in a series, and what may come yet.")
      .def("leave", &loft::Mailboxes::leave, "Say that this rank posts nothing any more.")
      .def("all_is_read", &loft::Mailboxes::all_is_read,
           "Say whether all that was posted was read.")
      .def_property_readonly("num_posted", &loft::Mailboxes::num_posted,
                             "Messages that each other rank was sent.");
  module.def(
      "own_alone",
      [](uintptr_t memory, uint64_t num_bytes, int descriptor) {
        void* alone = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE,
                           descriptor, 0);
        if (alone == MAP_FAILED) return false;
        void* there = reinterpret_cast<void*>(memory);
        const int move = MREMAP_MAYMOVE | MREMAP_FIXED;  // nothing is lost where it is refused
        if (mremap(alone, num_bytes, num_bytes, move, there) != MAP_FAILED) return true;
        munmap(alone, num_bytes);
        return false;
      },
      "memory"_a, "num_bytes"_a, "descriptor"_a,
      "Have what this process writes to shared memory from now on be its own; False if refused.");
  // Its thread never takes Python's lock, so that holding it keeps no object from its end.
  py::class_<loft::Pulse>(module, "Pulse",
                          "Bytes on sockets once a period, whoever holds the interpreter.")
      .def(py::init([](double period_s, const py::bytes& bytes) {
             return std::make_unique<loft::Pulse>(period_s, std::string(bytes));
           }),
           "period_s"_a, "bytes"_a)
      .def("add", &loft::Pulse::add, "descriptor"_a, "Begin to write to a socket.")
      .def("remove", &loft::Pulse::remove, "descriptor"_a, "End writing to it.")
      .def("stop", &loft::Pulse::stop, py::call_guard<py::gil_scoped_release>(),
           "End the thread; can be called again.");
  // Its thread does not take Python's lock either: it ends processes that hold that for ever.
  module.def(
      "leave_in", &loft::leave_in, "seconds"_a, "why"_a,
      "Leave the process with status 1 after so many seconds, whoever holds the interpreter.");
  module.def(
      "add_grace", &loft::add_grace, "descriptor"_a, "seconds"_a,
      "Let SIGTERM write to a socket at once, and end the process so many seconds later; False "
      "where it does not take its default action.");
  module.def("told_s", &loft::told_s,
             "Return the seconds since SIGTERM gave this process its last ones, or -1.");
  module.def("remove_grace", &loft::remove_grace, "descriptor"_a,
             "End writing to it; after the last one SIGTERM ends the process at once.");
  module.def("stack_of", &stack_of, "thread"_a, "most"_a,
             "Return the frames of a thread, the innermost first.");
  module.def("locals_of", &locals_of, "frame"_a, "names"_a,
             "Return those of a frame's variables that have these names.");
  // Shares of samples. All arrays are int64 and lie in NumPy's memory; results are written in
  // place.
  module.def(
      "raise_flow",
      [](int64_t num_nodes, int64_t num_arcs, uintptr_t tails, uintptr_t heads,
         uintptr_t capacities, uintptr_t costs, uintptr_t flows, int64_t source, int64_t sink) {
        const loft::Arcs arcs{num_nodes,
                              num_arcs,
                              counts_at(tails),
                              counts_at(heads),
                              counts_at(capacities),
                              counts_at(costs),
                              numbers_at(flows)};
        const Unlocked release;
        loft::raise_flow(arcs, source, sink);
      },
      "num_nodes"_a, "num_arcs"_a, "tails"_a, "heads"_a, "capacities"_a, "costs"_a, "flows"_a,
      "source"_a, "sink"_a,
      "Raise flows, int64 as all arrays of an arc, to a cheapest maximum flow; costs 0 for none.");
  module.def(
      "fill_rows",
      [](int64_t num_rows, uintptr_t counts, uintptr_t starts, uintptr_t ranks, uintptr_t cells,
         uintptr_t spare, uintptr_t room, uintptr_t given) {
        const Unlocked release;
        loft::fill_rows(num_rows, counts_at(counts), counts_at(starts), counts_at(ranks),
                        counts_at(cells), numbers_at(spare), numbers_at(room), numbers_at(given));
      },
      "num_rows"_a, "counts"_a, "starts"_a, "ranks"_a, "cells"_a, "spare"_a, "room"_a, "given"_a,
      "Give samples of rows to ranks in proportion to what they can take, row by row; all int64.");
  module.def(
      "fill_room",
      [](int64_t num_rows, int64_t num_ranks, uintptr_t counts, uintptr_t needed, uintptr_t room,
         uintptr_t given) {
        const Unlocked release;
        loft::fill_room(num_rows, num_ranks, counts_at(counts), numbers_at(needed), counts_at(room),
                        numbers_at(given));
      },
      "num_rows"_a, "num_ranks"_a, "counts"_a, "needed"_a, "room"_a, "given"_a,
      "Give samples of rows to all ranks in proportion to what they need, within room; all int64.");
#if defined(LOFT_HAVE_CUDA)
  // The same on a device. They queue and come back: rows, results and room must live until the
  // stream has passed them, which torch's allocator sees to for memory of that stream.
  module.attr("has_cuda") = true;
  module.def(
      "distance_cells",
      [](int64_t rows, int64_t numel, int dtype) {
        return loft::distance_cells(job_of(std::vector<uintptr_t>(static_cast<size_t>(rows)), numel,
                                           dtype, 0, 0, 0, {}, 0));
      },
      "rows"_a, "numel"_a, "dtype"_a, "How many float64 distances_cuda needs room for in sums.");
  module.def(
      "distances_cuda",
      [](const std::vector<uintptr_t>& rows, int64_t numel, int dtype, uintptr_t sums,
         uintptr_t table, int device, uintptr_t stream) {
        const loft::Job job = job_of(rows, numel, dtype, 0, 0, 0, {}, 0);
        const Unlocked release;
        loft::distances_cuda(job, {device, reinterpret_cast<void*>(stream), {}},
                             reinterpret_cast<double*>(sums), reinterpret_cast<double*>(table));
      },
      "rows"_a, "numel"_a, "dtype"_a, "sums"_a, "table"_a, "device"_a, "stream"_a,
      "Queue distances_cpu on a CUDA device; sums, of distance_cells, and table lie there.");
  module.def("mix_cells", &loft::mix_cells, "rows"_a, "num_mixed"_a,
             "How many float64 mix_cuda needs room for.");
  module.def(
      "mix_cuda",
      [](const std::vector<uintptr_t>& rows, int64_t numel, int dtype, std::vector<double> scales,
         std::vector<double> matrix, int num_mixed, int rule, int kind, int f,
         std::vector<int32_t> weights, uintptr_t out, uintptr_t room, int device, uintptr_t stream,
         int diagnose_every, uintptr_t low, uintptr_t high, uintptr_t sums) {
        const loft::Job job = job_of(rows, numel, dtype, rule, kind, f, std::move(weights), out);
        const auto options = cuda_options(device, stream, diagnose_every, low, high, sums);
        const Unlocked release;
        loft::mix_cuda(job, {num_mixed, std::move(scales), std::move(matrix)},
                       reinterpret_cast<double*>(room), options);
      },
      "rows"_a, "numel"_a, "dtype"_a, "scales"_a, "matrix"_a, "num_mixed"_a, "rule"_a, "kind"_a,
      "f"_a, "weights"_a, "out"_a, "room"_a, "device"_a, "stream"_a, "diagnose_every"_a, "low"_a,
      "high"_a, "sums"_a,
      "Queue mix_cpu on a CUDA device; room, of mix_cells, lies there, and with "
      "diagnose_every > 0 low and high are filled.");
  module.def(
      "aggregate_cuda",
      [](const std::vector<uintptr_t>& rows, int64_t numel, int dtype, int rule, int kind, int f,
         std::vector<int32_t> weights, uintptr_t out, int device, uintptr_t stream,
         int diagnose_every, uintptr_t low, uintptr_t high, uintptr_t sums) {
        const loft::Job job = job_of(rows, numel, dtype, rule, kind, f, std::move(weights), out);
        const auto options = cuda_options(device, stream, diagnose_every, low, high, sums);
        const Unlocked release;
        loft::aggregate_cuda(job, options);
      },
      "rows"_a, "numel"_a, "dtype"_a, "rule"_a, "kind"_a, "f"_a, "weights"_a, "out"_a, "device"_a,
      "stream"_a, "diagnose_every"_a, "low"_a, "high"_a, "sums"_a,
      "Queue the aggregation of rows on a CUDA device into out, on the caller's stream. With "
      "diagnose_every > 0 also the sums of CudaDiagnostics, in aggregate.h.");
#endif
}
