// Layer 4. What runs in several threads, for the thread sanitizer: blocks of one job, jobs of
// several callers at a time, and a pulse and a grace whose sockets come and go.
//
//   check_threads [LEVEL]   instruction set; default: the best that runs here

#include <poll.h>

#include <stdexcept>
#include <thread>

#include "checks/plain.h"
#include "levels.h"
#include "process/grace.h"
#include "process/pulse.h"
#include "wire/mailboxes.h"

namespace loft::checks {
namespace {

std::string level;

// Calls body(caller) in so many threads at the same time.
template <typename Body>
void in_threads(int callers, const Body& body) {
  std::vector<std::thread> threads;
  for (int caller = 0; caller < callers; ++caller) threads.emplace_back(body, caller);
  for (std::thread& thread : threads) thread.join();
}

// The same job, with three threads, by two callers, and alone: the same results and sums.
template <DType kDType>
void check_jobs(int rows, int64_t numel, bool is_weighted) {
  struct Run {
    Case<kDType> made;
    Diagnostics found, mixed;
    std::vector<double> table;
    std::vector<typename Stored<kDType>::Bits> results;
  };
  const auto run = [&](Run& each, int threads) {
    Job& job = each.made.job;
    job.params = {Rule::kTrimmedMean, MedianKind::kMidpoint, 1};
    aggregate_cpu(job, {threads, level, &each.found, 2});
    for (int64_t i = 0; i < numel; ++i) each.results.push_back(each.made.result(i));
    distances_cpu(job, {threads, level, nullptr, 0}, each.table.data());
    const Matrix halves{rows, std::vector<double>(static_cast<size_t>(rows), 1),
                        std::vector<double>(static_cast<size_t>(rows * rows), 0.5)};
    mix_cpu(job, halves, {threads, level, &each.mixed, 2});
    for (int64_t i = 0; i < numel; ++i) each.results.push_back(each.made.result(i));
    if (kDType == DType::kFloat32) pass_cpu(job, {threads, level, nullptr, 0}, true);
  };
  std::vector<Run> runs;
  for (int caller = 0; caller < 3; ++caller) {
    const size_t side = static_cast<size_t>(rows + 1);
    runs.push_back({Case<kDType>(rows, numel, 0, is_weighted, 1, true),
                    Diagnostics(),
                    Diagnostics(),
                    std::vector<double>(side * side),
                    {}});
  }
  in_threads(2, [&](int caller) { run(runs[caller], 3); });
  run(runs[2], 1);
  for (int caller : {0, 1}) {
    const Run &shared = runs[caller], &alone = runs[2];
    const bool has_table =  // bits: it has NaN
        std::memcmp(shared.table.data(), alone.table.data(), 8 * alone.table.size()) == 0;
    expect(shared.results == alone.results && has_table &&
               shared.found.squared_distance == alone.found.squared_distance &&
               shared.found.num_outside == alone.found.num_outside &&
               shared.mixed.squared_distance == alone.mixed.squared_distance,
           alone.made.job, ": threads find others");
  }
}

// Whether something can be read within two seconds; reads it.
bool is_heard(int descriptor) {
  pollfd waiting{descriptor, POLLIN, 0};
  char bytes[256];
  return poll(&waiting, 1, 2000) == 1 && recv(descriptor, bytes, sizeof(bytes), 0) > 0;
}

// Two threads add and remove sockets of one pulse; every socket hears it while it is there.
void check_pulse() {
  Pulse pulse(0.001, "\npulse 0 0.000 \n");
  constexpr int kTurns = 50;
  int num_heard[2] = {};
  in_threads(2, [&](int caller) {
    for (int turn = 0; turn < kTurns; ++turn) {
      int ends[2];
      const bool is_made = socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0;
      pulse.add(ends[0]);
      num_heard[caller] += is_made && is_heard(ends[1]);
      // Half of them end while it still writes to them. Removed before they are closed: then the
      // other thread may get their numbers.
      if (turn % 2) shutdown(ends[1], SHUT_RDWR);
      pulse.remove(ends[0]);
      for (int end : ends) close(end);
    }
  });
  pulse.stop();
  pulse.stop();  // nothing happens
  for (int heard : num_heard) expect(heard == kTurns, heard, " of ", kTurns, " sockets heard it");
}

// Two threads add and remove sockets of the grace, until SIGTERM comes; one stays and hears it.
void check_grace() {
  int ends[2];
  const bool is_made = socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0;
  expect(is_made && add_grace(ends[0], 30.0), "there is no grace");
  constexpr int kTurns = 100;
  int num_added[2] = {};  // or told meanwhile
  in_threads(2, [&](int caller) {
    for (int turn = 0; turn < kTurns; ++turn) {
      const int other = dup(ends[0]);
      const bool is_added = add_grace(other, 30.0);
      num_added[caller] += is_added || since_sigterm_s() >= 0;
      if (caller == 0 && turn == kTurns / 2) kill(getpid(), SIGTERM);
      remove_grace(other);
      close(other);
    }
  });
  for (int added : num_added) expect(added == kTurns, "a grace in ", added, " of ", kTurns);
  expect(since_sigterm_s() >= 0 && is_heard(ends[1]), "nobody has heard of SIGTERM");
  remove_grace(ends[0]);
  for (int end : ends) close(end);
}

// Two threads that are two ranks exchange values in boxes that go round, and then leave.
void check_mailboxes() {
  constexpr uint64_t kCapacity = 3, kTag = 7, kTurns = 3000;
  const uint64_t head = Mailboxes::head_bytes(2, kCapacity);
  std::vector<uint64_t> memories[2];  // boxes, and two values in turn
  for (auto& memory : memories) memory.resize(head / 8 + 2);
  const auto begin = [&](int rank) { return reinterpret_cast<uintptr_t>(memories[rank].data()); };
  uint64_t num_right[2] = {};
  bool is_told[2] = {};
  in_threads(2, [&](int rank) {
    const int peer = 1 - rank;
    Mailboxes boxes({begin(0), begin(1)}, rank, head + 16, kCapacity);
    for (uint64_t turn = 0; turn < kTurns; ++turn) {
      // The other one has read what lay there: it has posted since.
      const uint64_t at = head / 8 + turn % 2;
      memories[rank][at] = 1000 * turn + rank;
      const uint64_t number = boxes.post(1, kTag, {8 * at, 8 * at}, 8);
      for (int64_t asked = 0; !boxes.has_all(kTag, number) && asked < 100'000'000; ++asked) {
        std::this_thread::yield();
      }
      const uint64_t place = boxes.take_place(peer, kTag, number, 8);
      num_right[rank] += memories[peer][place / 8] == 1000 * turn + peer;
      boxes.has_read(peer);
    }
    boxes.leave();
    for (int64_t asked = 0; !is_told[rank] && asked < 1'000'000; ++asked) {
      try {
        boxes.has_all(kTag, kTurns + 1);
        std::this_thread::yield();
      } catch (const std::runtime_error&) {
        is_told[rank] = true;
      }
    }
  });
  for (uint64_t right : num_right) {
    expect(right == kTurns, right, " of ", kTurns, " values came through the boxes");
  }
  for (int rank : {0, 1}) expect(is_told[rank], "rank ", rank, " has not heard who has left");
}

}  // namespace
}  // namespace loft::checks

int main(int argc, char** argv) {
  using namespace loft;
  if (argc > 1) checks::level = argv[1];
  // Several blocks, and enough bytes for three threads.
  checks::check_jobs<DType::kFloat32>(9, 12 * kBlock + 5, false);
  checks::check_jobs<DType::kFloat64>(20, 3 * kBlock + 5, false);
  checks::check_jobs<DType::kBFloat16>(40, 5 * kBlock + 5, true);
  checks::check_pulse();
  checks::check_mailboxes();
  checks::check_grace();  // at last: half a minute later the process ends
  return checks::report("threads");
}
