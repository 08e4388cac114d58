// Layer 1. Whole samples shared out among ranks, for loft_hvd/data/assign.py. Of equals the first
// is chosen throughout: all ranks of a job must find the same shares.
#pragma once

#include <cstdint>
#include <vector>

namespace loft {

// A directed network: arc i leads from tails[i] to heads[i], carries up to capacities[i] units,
// each for costs[i] >= 0 (null for 0 everywhere), and carries flows[i] of them.
struct Arcs {
  int64_t num_nodes = 0;
  int64_t num_arcs = 0;
  const int64_t* tails = nullptr;
  const int64_t* heads = nullptr;
  const int64_t* capacities = nullptr;
  const int64_t* costs = nullptr;
  int64_t* flows = nullptr;
};

// Push as much as fits from `source` to `sink`, at the least cost; `flows` must be a cheapest flow
// of its value. Primal-dual: prices by Dijkstra, blocking flows by Dinic.
void raise_flow(const Arcs& arcs, int64_t source, int64_t sink);

// Give counts[i] samples of row i to ranks[starts[i]..starts[i + 1]), in proportion to what each
// can take: its `spare`, and the `room` of its cell. Row by row; both are used up, and `given` is
// written, one number for each of `ranks`, as `cells` has (null where no room counts).
void fill_rows(int64_t num_rows, const int64_t* counts, const int64_t* starts, const int64_t* ranks,
               const int64_t* cells, int64_t* spare, int64_t* room, int64_t* given);

// Give counts[i] samples of row i to num_ranks ranks in proportion to what they still need, at most
// room[i][rank]; the largest rows first, of equals the first. `needed` is used up; `given` is
// [num_rows][num_ranks].
void fill_room(int64_t num_rows, int64_t num_ranks, const int64_t* counts, int64_t* needed,
               const int64_t* room, int64_t* given);

}  // namespace loft
