// Layer 1. Who computes which samples: a cheapest maximum flow from groups of samples to the ranks
// that hold them, and shares in proportion where nobody does. Integers throughout, and ties go to
// the first, so that every rank computes the same.

#include "shares/shares.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <queue>
#include <stdexcept>
#include <utility>

namespace loft {
namespace {

// A network in which flow is pushed by Dinic's algorithm (Soviet Math. Doklady 11, 1970), along
// shortest paths by price where arcs have costs (successive shortest paths with potentials, Edmonds
// and Karp, J. ACM 19, 1972).
//
// Half-arcs 2i and 2i + 1 are arc i and its reverse, so `half ^ 1` is the twin of either. What
// flows through a half-arc is the room of its twin. Of an arc 3 from node 0 to node 2 with capacity
// 5 and flow 2:
//
//   half 6  leaves 0, head 2, room 3     what may still flow
//   half 7  leaves 2, head 0, room 2     what may be taken back
class Network {
 public:
  Network(const Arcs& arcs, int64_t source, int64_t sink)
      : source_(source),
        sink_(sink),
        out_start_(arcs.num_nodes + 1),
        out_(2 * arcs.num_arcs),
        head_(2 * arcs.num_arcs),
        room_(2 * arcs.num_arcs),
        level_(arcs.num_nodes),
        untried_(arcs.num_nodes) {
    for (int64_t i = 0; i < arcs.num_arcs; ++i) {
      ++out_start_[arcs.tails[i] + 1];
      ++out_start_[arcs.heads[i] + 1];
      head_[2 * i] = static_cast<int32_t>(arcs.heads[i]);
      head_[2 * i + 1] = static_cast<int32_t>(arcs.tails[i]);
      room_[2 * i] = arcs.capacities[i] - arcs.flows[i];
      room_[2 * i + 1] = arcs.flows[i];
    }
    std::partial_sum(out_start_.begin(), out_start_.end(), out_start_.begin());
    std::vector<int32_t> next(out_start_.begin(), out_start_.end() - 1);
    for (int64_t i = 0; i < arcs.num_arcs; ++i) {  // a node's half-arcs in the order of the arcs
      out_[next[arcs.tails[i]]++] = static_cast<int32_t>(2 * i);
      out_[next[arcs.heads[i]]++] = static_cast<int32_t>(2 * i + 1);
    }
    if (arcs.costs == nullptr) return;
    cost_.resize(2 * arcs.num_arcs);
    price_.resize(arcs.num_nodes);
    for (int64_t i = 0; i < arcs.num_arcs; ++i) {
      cost_[2 * i] = arcs.costs[i];
      cost_[2 * i + 1] = -arcs.costs[i];
    }
  }

  // Raise the flow until no path from source to sink has room, cheapest paths first.
  void maximise() {
    if (cost_.empty()) {  // every price stays 0
      while (find_levels()) push_blocking();
      return;
    }
    while (reprice()) {
      while (find_levels()) push_blocking();
    }
  }

  int64_t flow(int64_t arc) const { return room_[2 * arc + 1]; }

 private:
  // Raise prices by the shortest distances; false when the sink is cut off. Dijkstra's algorithm on
  // reduced costs, cost + price of the tail - price of the head, none of which is below 0.
  bool reprice() {
    std::vector<int64_t> far(price_.size(), -1);  // of nodes whose distance is final
    using Entry = std::pair<int64_t, int32_t>;    // distance, node
    std::priority_queue<Entry, std::vector<Entry>, std::greater<>> queue;
    queue.emplace(0, static_cast<int32_t>(source_));
    while (!queue.empty() && far[sink_] < 0) {
      const auto [distance, node] = queue.top();
      queue.pop();
      if (far[node] >= 0) continue;
      far[node] = distance;
      for (int32_t at = out_start_[node]; at < out_start_[node + 1]; ++at) {
        const int32_t half = out_[at], head = head_[half];
        if (room_[half] > 0 && far[head] < 0) {
          queue.emplace(distance + cost_[half] + price_[node] - price_[head], head);
        }
      }
    }
    if (far[sink_] < 0) return false;
    // Nodes beyond the sink rise by as much as it does: no reduced cost falls below 0.
    for (size_t node = 0; node < far.size(); ++node) {
      price_[node] += far[node] < 0 ? far[sink_] : far[node];
    }
    return true;
  }

  // Whether a half-arc has room and lies on a cheapest path.
  bool is_open(int32_t half, int32_t tail) const {
    if (room_[half] <= 0) return false;
    return cost_.empty() || cost_[half] + price_[tail] - price_[head_[half]] == 0;
  }

  // Find how many open half-arcs each node lies from the source; false when the sink does not.
  bool find_levels() {
    std::fill(level_.begin(), level_.end(), -1);
    level_[source_] = 0;
    frontier_.assign(1, static_cast<int32_t>(source_));
    while (!frontier_.empty() && level_[sink_] < 0) {
      reached_.clear();
      for (int32_t node : frontier_) {
        for (int32_t at = out_start_[node]; at < out_start_[node + 1]; ++at) {
          const int32_t head = head_[out_[at]];
          if (level_[head] < 0 && is_open(out_[at], node)) {
            level_[head] = level_[node] + 1;
            reached_.push_back(head);
          }
        }
      }
      frontier_.swap(reached_);
    }
    return level_[sink_] >= 0;
  }

  // Push along open half-arcs that rise a level until every such path has a full one.
  void push_blocking() {
    // A half-arc that led nowhere is not tried again: each node goes on where it stopped.
    std::copy(out_start_.begin(), out_start_.end() - 1, untried_.begin());
    path_.clear();
    auto node = static_cast<int32_t>(source_);
    for (;;) {
      if (node == sink_) {
        int64_t units = room_[path_[0]];
        for (int32_t half : path_) units = std::min(units, room_[half]);
        size_t full = path_.size();
        for (size_t i = path_.size(); i-- > 0;) {
          room_[path_[i]] -= units;
          room_[path_[i] ^ 1] += units;
          if (room_[path_[i]] == 0) full = i;
        }
        // Go on from the tail of the first full one: what leads there still has room.
        node = head_[path_[full] ^ 1];
        path_.resize(full);
        continue;
      }
      const int32_t before = node;
      while (untried_[before] < out_start_[before + 1]) {
        const int32_t half = out_[untried_[before]++];
        if (level_[head_[half]] == level_[before] + 1 && is_open(half, before)) {
          path_.push_back(half);
          node = head_[half];
          break;
        }
      }
      if (node != before) continue;
      if (path_.empty()) return;  // no way on from the source
      node = head_[path_.back() ^ 1];
      path_.pop_back();
    }
  }

  const int64_t source_, sink_;
  std::vector<int32_t> out_start_;  // [num_nodes + 1], where a node's half-arcs begin in out_
  std::vector<int32_t> out_;        // [2 * num_arcs], half-arcs by the node that they leave
  std::vector<int32_t> head_;       // [2 * num_arcs], as room_ and cost_
  std::vector<int64_t> room_;
  std::vector<int64_t> cost_, price_;  // empty without costs
  std::vector<int32_t> level_, untried_, frontier_, reached_, path_;
};

// Gives min(count, sum of spare) out in proportion to spare, by largest remainders; of equals the
// first gets it. 7 to ranks that have room for 4, 4 and 2: 2.8, 2.8 and 1.4 round down to 2, 2 and
// 1, and the two that are missing go to the first two.
class Proportional {
 public:
  void give(int64_t count, const int64_t* spare, int64_t num_ranks, int64_t* given) {
    const int64_t total = std::accumulate(spare, spare + num_ranks, int64_t{0});
    int64_t missing = count = std::min(count, total);
    remainder_.resize(num_ranks);
    for (int64_t i = 0; i < num_ranks; ++i) {
      const int64_t product = count * spare[i];
      given[i] = product < total || total == 0 ? 0 : product / total;  // most need no division
      remainder_[i] = product - given[i] * total;
      missing -= given[i];
    }
    if (missing == 0) return;
    order_.resize(num_ranks);
    std::iota(order_.begin(), order_.end(), 0);
    std::nth_element(order_.begin(), order_.begin() + missing - 1, order_.end(),
                     [this](int32_t a, int32_t b) {
                       if (remainder_[a] != remainder_[b]) return remainder_[a] > remainder_[b];
                       return a < b;
                     });
    for (int64_t i = 0; i < missing; ++i) ++given[order_[i]];
  }

 private:
  std::vector<int64_t> remainder_;
  std::vector<int32_t> order_;
};

}  // namespace

void raise_flow(const Arcs& arcs, int64_t source, int64_t sink) {
  const auto is_node = [&arcs](int64_t node) { return 0 <= node && node < arcs.num_nodes; };
  for (int64_t i = 0; i < arcs.num_arcs; ++i) {
    if (!is_node(arcs.tails[i]) || !is_node(arcs.heads[i])) {
      throw std::invalid_argument("raise_flow: an arc names a node that is not there");
    }
  }
  if (!is_node(source) || !is_node(sink) || source == sink || arcs.num_arcs > INT32_MAX / 2) {
    throw std::invalid_argument("raise_flow: source, sink or the number of arcs is out of range");
  }
  Network network(arcs, source, sink);
  network.maximise();
  for (int64_t i = 0; i < arcs.num_arcs; ++i) arcs.flows[i] = network.flow(i);
}

void fill_rows(int64_t num_rows, const int64_t* counts, const int64_t* starts, const int64_t* ranks,
               const int64_t* cells, int64_t* spare, int64_t* room, int64_t* given) {
  Proportional proportional;
  std::vector<int64_t> here;  // what the row's ranks can take
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t begin = starts[row], num_ranks = starts[row + 1] - begin;
    here.resize(num_ranks);
    for (int64_t i = 0; i < num_ranks; ++i) {
      here[i] = spare[ranks[begin + i]];
      if (cells != nullptr) here[i] = std::min(here[i], room[cells[begin + i]]);
    }
    proportional.give(counts[row], here.data(), num_ranks, given + begin);
    for (int64_t i = 0; i < num_ranks; ++i) {
      spare[ranks[begin + i]] -= given[begin + i];
      if (cells != nullptr) room[cells[begin + i]] -= given[begin + i];
    }
  }
}

void fill_room(int64_t num_rows, int64_t num_ranks, const int64_t* counts, int64_t* needed,
               const int64_t* room, int64_t* given) {
  std::vector<int64_t> order(num_rows);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [counts](int64_t a, int64_t b) { return counts[a] > counts[b]; });
  std::fill(given, given + num_rows * num_ranks, 0);
  Proportional proportional;
  for (int64_t row : order) {
    if (counts[row] == 0) break;
    int64_t* to = given + row * num_ranks;
    proportional.give(counts[row], needed, num_ranks, to);
    for (int64_t i = 0; i < num_ranks; ++i) {
      to[i] = std::min(to[i], room[row * num_ranks + i]);
      needed[i] -= to[i];
    }
  }
}

}  // namespace loft
