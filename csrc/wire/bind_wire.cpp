// Layer 4. Python names of what goes between processes: messages in shared memory, and floats in
// fewer bytes. Memory is given by address: Python keeps its owners alive.

#include "bindings.h"

#include <cstring>
#include <string>
#include <vector>

#include "levels.h"
#include "wire/compact.h"
#include "wire/mailboxes.h"
#include "wire/messages.h"
#include "wire/private_memory.h"

namespace loft {

void bind_wire(py::module_& module) {
  // Values in fewer bytes, for links slower than memory.
  module.def(
      "compact_room",
      [](int64_t count, int dtype) { return compact_room(count, static_cast<DType>(dtype)); },
      "count"_a, "dtype"_a, "How many bytes compact_cpu may write for so many values.");
  module.def(
      "compact_cpu",
      [](uintptr_t values, int64_t count, int dtype, uintptr_t out, const std::string& isa) {
        const Unlocked release;
        return compact_cpu(reinterpret_cast<const void*>(values), count, static_cast<DType>(dtype),
                           reinterpret_cast<void*>(out), isa);
      },
      "values"_a, "count"_a, "dtype"_a, "out"_a, "isa"_a,
      "Write a message of float32, float16 or bfloat16 values into out; return its bytes.");
  module.def(
      "expand_cpu",
      [](uintptr_t from, int64_t room, uintptr_t values, int64_t count, int dtype,
         const std::string& isa) {
        const Unlocked release;
        return expand_cpu(reinterpret_cast<const void*>(from), room,
                          reinterpret_cast<void*>(values), count, static_cast<DType>(dtype), isa);
      },
      "from"_a, "room"_a, "values"_a, "count"_a, "dtype"_a, "isa"_a,
      "Read the values of such a message, bit for bit; False where it is none.");
  module.def(
      "packet_codec",
      [](const std::string& isa) {
        const PacketCodec& codec = level_for(isa).codec().of_packets;
        return py::capsule(&codec, kPacketCodecName);
      },
      "isa"_a, "Return what makes packets of values shorter, for Port.set_codec.");
  // Memory that processes share, by address. The interpreter's lock keeps threads apart here, and
  // no signal's handler runs within a call.
  py::class_<Mailboxes>(module, "Mailboxes", "Messages between processes that share memory.")
      .def(py::init<std::vector<uintptr_t>, int, uint64_t, uint64_t>(), "heads"_a, "rank"_a,
           "num_bytes"_a, "capacity"_a)
      .def_static("head_bytes", &Mailboxes::head_bytes, "num_ranks"_a, "capacity"_a,
                  "Return how much of a memory is boxes.")
      .def("post", &Mailboxes::post, "series"_a, "tag"_a, "places"_a, "num_bytes"_a,
           "Tell each other rank where values for it lie; return the exchange's number.")
      .def("has_all", &Mailboxes::has_all, "tag"_a, "number"_a,
           "Say whether the values of all other ranks lie ready.")
      .def("take_place", &Mailboxes::take_place, "peer"_a, "tag"_a, "number"_a, "num_bytes"_a,
           "Return where a rank's values lie in its memory, to be read until has_read.")
      .def("has_read", &Mailboxes::has_read, "peer"_a,
           "Say that what one take_place of a rank has shown is not read any more.")
      .def(
          "read",
          [](Mailboxes& boxes, int peer, uint64_t tag, uint64_t number, uintptr_t memory,
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
      .def("end", &Mailboxes::end, "series"_a,
           "Forget what was sent in a series, and what may come yet.")
      .def("leave", &Mailboxes::leave, "Say that this rank posts nothing any more.")
      .def("all_is_read", &Mailboxes::all_is_read, "Say whether all that was posted was read.")
      .def_property_readonly("num_posted", &Mailboxes::num_posted,
                             "Messages that each other rank was sent.");
  module.def(
      "make_private",
      [](uintptr_t memory, uint64_t num_bytes, int descriptor) {
        return make_private(reinterpret_cast<void*>(memory), num_bytes, descriptor);
      },
      "memory"_a, "num_bytes"_a, "descriptor"_a,
      "Have what this process writes to shared memory from now on be its own; False if refused.");
}

}  // namespace loft
