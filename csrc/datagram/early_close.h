// Layer 1. When an owner stops to wait for what is missing of a row.
//
// After LTP (arXiv 2305.04279): a link has a usual time for so many bytes, and all links of a
// gather a deadline, some slack behind the longest of these. A row is closed
//   as it is complete;
//   at the link's usual time, if enough of it is there;
//   from then on, the moment when enough is there;
//   at the deadline, with what is there.
// Other than there, senders tell when they have sent every block once, which is when the usual time
// has come: what was not sent is late, and only what was sent can be lost. Only the deadline is
// from what links have done before.
#pragma once

#include <algorithm>

#include "datagram/packet.h"

namespace loft::datagram {

struct ClosingTimes {
  Nanos usual;     // of this link, from its sender's start on
  Nanos deadline;  // of all links
};

// The usual time of `bytes` on a link: one and a half of its round trips, and their own time.
inline Nanos usual_time(Nanos shortest_trip, double bytes, double bytes_per_s) {
  if (bytes_per_s <= 0) return 3 * shortest_trip / 2;
  return 3 * shortest_trip / 2 + static_cast<Nanos>(bytes / bytes_per_s * kSecond);
}

// Whether a row, of which `share` is there `elapsed` after its start, may be closed.
inline bool may_close(Nanos elapsed, double share, double enough, const ClosingTimes& times) {
  if (share >= 1) return true;
  if (elapsed >= times.deadline) return true;
  return elapsed >= times.usual && share >= enough;
}

}  // namespace loft::datagram
