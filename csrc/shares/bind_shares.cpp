// Layer 4. Python names of shares of samples. All arrays are int64 and lie in NumPy's memory;
// results are written in place.

#include "bindings.h"

#include "shares/shares.h"

namespace loft {
namespace {

// Addresses of int64 arrays; 0 is null.
const int64_t* counts_at(uintptr_t address) { return reinterpret_cast<const int64_t*>(address); }
int64_t* numbers_at(uintptr_t address) { return reinterpret_cast<int64_t*>(address); }

}  // namespace

void bind_shares(py::module_& module) {
  module.def(
      "raise_flow",
      [](int64_t num_nodes, int64_t num_arcs, uintptr_t tails, uintptr_t heads,
         uintptr_t capacities, uintptr_t costs, uintptr_t flows, int64_t source, int64_t sink) {
        const Arcs arcs{num_nodes,
                        num_arcs,
                        counts_at(tails),
                        counts_at(heads),
                        counts_at(capacities),
                        counts_at(costs),
                        numbers_at(flows)};
        const Unlocked release;
        raise_flow(arcs, source, sink);
      },
      "num_nodes"_a, "num_arcs"_a, "tails"_a, "heads"_a, "capacities"_a, "costs"_a, "flows"_a,
      "source"_a, "sink"_a,
      "Raise flows, int64 as all arrays of an arc, to a cheapest maximum flow; costs 0 for none.");
  module.def(
      "fill_rows",
      [](int64_t num_rows, uintptr_t counts, uintptr_t starts, uintptr_t ranks, uintptr_t cells,
         uintptr_t spare, uintptr_t room, uintptr_t given) {
        const Unlocked release;
        fill_rows(num_rows, counts_at(counts), counts_at(starts), counts_at(ranks),
                  counts_at(cells), numbers_at(spare), numbers_at(room), numbers_at(given));
      },
      "num_rows"_a, "counts"_a, "starts"_a, "ranks"_a, "cells"_a, "spare"_a, "room"_a, "given"_a,
      "Give samples of rows to ranks in proportion to what they can take, row by row; all int64.");
  module.def(
      "fill_room",
      [](int64_t num_rows, int64_t num_ranks, uintptr_t counts, uintptr_t needed, uintptr_t room,
         uintptr_t given) {
        const Unlocked release;
        fill_room(num_rows, num_ranks, counts_at(counts), numbers_at(needed), counts_at(room),
                  numbers_at(given));
      },
      "num_rows"_a, "num_ranks"_a, "counts"_a, "needed"_a, "room"_a, "given"_a,
      "Give samples of rows to all ranks in proportion to what they need, within room; all int64.");
}

}  // namespace loft
