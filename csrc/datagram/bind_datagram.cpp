// Layer 5. Python names of port.h: the module `_loft_datagram`, apart from `_loft`, which needs no
// libcrypto. Memory is given by address: Python keeps its owners alive until it is released.

#include "bindings.h"

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "datagram/early_close.h"
#include "datagram/port.h"

namespace loft::datagram {
namespace {

template <typename Pointer>
std::vector<Pointer> pointers(const std::vector<uintptr_t>& places) {
  std::vector<Pointer> found;
  for (const uintptr_t place : places) found.push_back(reinterpret_cast<Pointer>(place));
  return found;
}

std::vector<uint8_t> bytes_of(const py::bytes& values) {
  const std::string text = values;
  return {text.begin(), text.end()};
}

Exchange exchange_of(uint64_t operation, const std::vector<uintptr_t>& sends,
                     const std::vector<uintptr_t>& rooms, uint64_t num_bytes, int dtype) {
  Exchange exchange;
  exchange.operation = operation;
  exchange.sends = pointers<const char*>(sends);
  exchange.rooms = pointers<char*>(rooms);
  exchange.num_bytes = num_bytes;
  exchange.dtype = dtype;
  return exchange;
}

}  // namespace

PYBIND11_MODULE(_loft_datagram, module) {
  module.attr("block_bytes") = kBlockBytes;
  module.def(
      "usual_time_s",
      [](double shortest_trip_s, double bytes, double bytes_per_s) {
        const auto trip = static_cast<Nanos>(shortest_trip_s * kSecond);
        return static_cast<double>(usual_time(trip, bytes, bytes_per_s)) / kSecond;
      },
      "shortest_trip_s"_a, "bytes"_a, "bytes_per_s"_a,
      "Return the usual time of so many bytes on a link, from the start of a row on.");
  module.def(
      "may_close",
      [](double elapsed_s, double share, double enough, double usual_s, double deadline_s) {
        const ClosingTimes times{static_cast<Nanos>(usual_s * kSecond),
                                 static_cast<Nanos>(deadline_s * kSecond)};
        return may_close(static_cast<Nanos>(elapsed_s * kSecond), share, enough, times);
      },
      "elapsed_s"_a, "share"_a, "enough"_a, "usual_s"_a, "deadline_s"_a,
      "Say whether a row may be closed of which all has been sent, and this share is there.");
  // Calls wait for the port's thread, which never asks for the interpreter's lock.
  using Free = py::call_guard<Unlocked>;
  py::class_<Port>(module, "Port", "A UDP port on which ranks exchange values.")
      .def(py::init([](int rank, int num_ranks, uint32_t world, std::string address, int first_port,
                       int last_port, const std::vector<py::bytes>& keys_out,
                       const std::vector<py::bytes>& keys_in, double most_bytes_per_s) {
             PortSettings settings{rank,      num_ranks, world, std::move(address), first_port,
                                   last_port, {},        {},    most_bytes_per_s};
             for (const auto& key : keys_out) settings.keys_out.push_back(key);
             for (const auto& key : keys_in) settings.keys_in.push_back(key);
             return std::make_unique<Port>(std::move(settings));
           }),
           "rank"_a, "num_ranks"_a, "world"_a, "address"_a, "first_port"_a, "last_port"_a,
           "keys_out"_a, "keys_in"_a, "most_bytes_per_s"_a)
      .def_property_readonly("number", &Port::number, "The port that is listened on.")
      .def("connect", &Port::connect, "peers"_a, Free(), "Begin; addresses and ports by rank.")
      .def("close", &Port::close, Free(), "End; nobody's memory is used from then on.")
      .def(
          "set_codec",
          [](Port& port, const py::capsule& codec, bool sends) {
            const auto* functions = static_cast<const PacketCodec*>(
                PyCapsule_GetPointer(codec.ptr(), kPacketCodecName));
            if (!functions) throw py::error_already_set();
            port.set_codec(*functions, sends);
          },
          "codec"_a, "sends"_a,
          "Have values travel in fewer bytes, where `sends`, and read those of others; a codec of "
          "`_loft`.")
      .def(
          "expect",
          [](Port& port, uint64_t operation, const std::vector<uintptr_t>& rooms,
             uint64_t num_bytes, int dtype) {
            const Exchange exchange = exchange_of(operation, {}, rooms, num_bytes, dtype);
            const Unlocked release;
            port.expect(exchange);
          },
          "operation"_a, "rooms"_a, "num_bytes"_a, "dtype"_a,
          "Let rows be written before the exchange begins.")
      .def(
          "begin",
          [](Port& port, uint64_t operation, const std::vector<uintptr_t>& sends,
             const std::vector<uintptr_t>& rooms, uint64_t num_bytes, int dtype, bool copies) {
            Exchange exchange = exchange_of(operation, sends, rooms, num_bytes, dtype);
            exchange.copies = copies;
            const Unlocked release;
            port.begin(exchange);
          },
          "operation"_a, "sends"_a, "rooms"_a, "num_bytes"_a, "dtype"_a, "copies"_a,
          "Begin an exchange in which nothing may be missing.")
      .def(
          "gather",
          [](Port& port, uint64_t operation, const std::vector<uintptr_t>& sends,
             const std::vector<uintptr_t>& rooms, uint64_t num_bytes, int dtype, int most_missing,
             const py::bytes& counts, const py::bytes& critical, double enough, double slack_s) {
            Exchange exchange = exchange_of(operation, sends, rooms, num_bytes, dtype);
            exchange.is_tolerant = exchange.lingers = true;
            exchange.most_missing = most_missing;
            exchange.counts = bytes_of(counts);
            exchange.critical = bytes_of(critical);
            exchange.enough = enough;
            exchange.slack = slack_s < 0 ? -1 : static_cast<Nanos>(slack_s * kSecond);
            const Unlocked release;
            port.begin(exchange);
          },
          "operation"_a, "sends"_a, "rooms"_a, "num_bytes"_a, "dtype"_a, "most_missing"_a,
          "counts"_a, "critical"_a, "enough"_a, "slack_s"_a,
          "Begin an exchange that may miss blocks.")
      .def("is_done", &Port::is_done, "operation"_a, Free(), "Say whether rows are there.")
      .def(
          "take",
          [](Port& port, uint64_t operation) {
            Outcome outcome;
            {
              const Unlocked release;
              outcome = port.take(operation);
            }
            const auto* missing = reinterpret_cast<const char*>(outcome.missing.data());
            return py::make_tuple(py::bytes(missing, outcome.missing.size()), outcome.error);
          },
          "operation"_a,
          "Return what is missing, [ranks, blocks] or nothing, and an error or \"\".")
      .def("take_released", &Port::take_released, Free(),
           "Return the exchanges whose memory is not used any more, each once.")
      .def("silent", &Port::silent, "limit_s"_a, Free(),
           "Return the ranks that have acknowledged nothing for so long.")
      .def("tunnelled", &Port::tunnelled, Free(),
           "Return the ranks to which packets go by TCP, as UDP does not pass.")
      .def(
          "state",
          [](Port& port, int peer) {
            const LinkState state = port.state(peer);
            py::dict found;
            found["packets_sent"] = state.counts.packets_sent;
            found["packets_lost"] = state.counts.packets_lost;
            found["packets_received"] = state.counts.packets_received;
            found["packets_refused"] = state.counts.packets_refused;
            found["blocks_sent_again"] = state.counts.blocks_sent_again;
            found["rows_closed_early"] = state.counts.rows_closed_early;
            found["blocks_missing"] = state.counts.blocks_missing;
            found["bytes_per_s"] = state.bytes_per_s;
            found["pace_bytes_per_s"] = state.pace_bytes_per_s;
            found["all_bytes_per_s"] = state.all_bytes_per_s;
            found["all_pace_bytes_per_s"] = state.all_pace_bytes_per_s;
            found["round_trip_s"] = static_cast<double>(state.shortest_trip) / kSecond;
            found["in_flight"] = state.in_flight;
            found["mean_share"] = state.mean_share;
            found["waits"] = state.waits;
            return found;
          },
          "peer"_a, "Return what is known of the link to a rank.")
      .def(
          "counts",
          [](Port& port) {
            const PortCounts counts = port.counts();
            py::dict found;
            found["strangers"] = counts.strangers;
            found["sends"] = counts.sends;
            found["receives"] = counts.receives;
            found["has_gso"] = counts.has_gso;
            found["has_gro"] = counts.has_gro;
            found["receive_buffer"] = counts.receive_buffer;
            return found;
          },
          "Return what the port has counted.");
}

}  // namespace loft::datagram
