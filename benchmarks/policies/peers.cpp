// Runs every peer's policy, and Belady's bound, over a trace: `peers TRACE CAPACITY ...`.
// Prints a line for each policy and capacity: name, capacity, blocks hit, work saved, and how many
// requests found less than a level without a bound has.
#include "peers.hpp"

// Work that `hits` leading blocks save: a token at position 131,072 costs twice one at the start.
static double work(int hits) { return hits + (hits - 1.0) * hits / 2 / 256; }

// How many leading blocks of each request were asked for before.
static std::vector<int> known_of(const Trace& trace) {
  std::vector<char> seen(trace.numbers, 0);
  std::vector<int> found;
  for (size_t request = 0; request < trace.requests(); request++) {
    size_t begin = trace.begins[request], end = trace.begins[request + 1], at = begin;
    while (at < end && seen[trace.blocks[at]]) at++;
    found.push_back(int(at - begin));
    for (at = begin; at < end; at++) seen[trace.blocks[at]] = 1;
  }
  return found;
}

struct Outcome {
  long hit = 0, cut = 0;
  double saved = 0;
  void add(int hits, int most) {
    hit += hits;
    cut += hits < most;
    saved += work(hits);
  }
  void print(const char* name, int capacity) const {
    std::printf("%s %d %ld %.1f %ld\n", name, capacity, hit, saved, cut);
  }
};

template <class P>
static void run(const char* name, const Trace& trace, int capacity) {
  static const std::vector<int> most = known_of(trace);
  P policy(capacity, trace.numbers);
  Outcome outcome;
  for (size_t request = 0; request < trace.requests(); request++) {
    const int32_t* blocks = &trace.blocks[trace.begins[request]];
    int count = int(trace.begins[request + 1] - trace.begins[request]), known = 0;
    while (known < count && policy.has(blocks[known])) known++;
    outcome.add(known, most[request]);
    if constexpr (requires { policy.ask(blocks, count); }) policy.ask(blocks, count);
    for (int at = count - 1; at >= 0; at--)
      if (policy.has(blocks[at])) policy.touch(blocks[at]);
      else policy.insert(blocks[at]);
  }
  outcome.print(name, capacity);
}

// The block that is asked for last goes first, the deepest of its request; with `passing`, blocks
// that are not asked for again do not come in.
static Outcome belady(const Trace& trace, int capacity, bool passing) {
  const std::vector<int> most = known_of(trace);
  const int NEVER = 1 << 30;
  std::vector<int> next(trace.blocks.size()), soon(trace.numbers, NEVER);
  for (size_t request = trace.requests(); request-- > 0;) {
    for (size_t at = trace.begins[request]; at < trace.begins[request + 1]; at++)
      next[at] = soon[trace.blocks[at]];
    for (size_t at = trace.begins[request]; at < trace.begins[request + 1]; at++)
      soon[trace.blocks[at]] = int(request);
  }
  std::vector<std::pair<int, int>> known(trace.numbers, {-1, -1});
  std::priority_queue<std::tuple<int, int, int>> order;
  int held = 0;
  Outcome outcome;
  for (size_t request = 0; request < trace.requests(); request++) {
    size_t begin = trace.begins[request], end = trace.begins[request + 1], at = begin;
    while (at < end && known[trace.blocks[at]].first >= 0) at++;
    outcome.add(int(at - begin), most[request]);
    for (at = begin; at < end; at++) {
      auto& there = known[trace.blocks[at]];
      if (next[at] == NEVER && passing) {
        held -= there.first >= 0;
        there.first = -1;
        continue;
      }
      held += there.first < 0;
      there = {next[at], int(at - begin)};
      order.push({next[at], int(at - begin), trace.blocks[at]});
    }
    while (held > capacity) {
      auto [when, depth, block] = order.top();
      order.pop();
      if (known[block] != std::make_pair(when, depth)) continue;
      known[block].first = -1;
      held--;
    }
  }
  return outcome;
}

int main(int count, char** given) {
  Trace trace(given[1]);
  for (int at = 2; at < count; at++) {
    int capacity = std::atoi(given[at]);
    run<LRU>("LRU", trace, capacity);
    run<FIFO>("FIFO", trace, capacity);
    run<LFU>("LFU", trace, capacity);
    run<LFUDA>("LFUDA", trace, capacity);
    run<ARC>("ARC", trace, capacity);
    run<S3FIFO10>("S3-FIFO-.1", trace, capacity);
    run<S3FIFO30>("S3-FIFO-.3", trace, capacity);
    run<S3FIFO50>("S3-FIFO-.5", trace, capacity);
    run<SIEVE>("SIEVE", trace, capacity);
    run<SLRU>("SLRU", trace, capacity);
    run<WTinyLFU>("W-TinyLFU", trace, capacity);
    run<MultiLRU>("MultiLRU", trace, capacity);
    run<TLRU>("T-LRU", trace, capacity);
    run<Marconi>("Marconi", trace, capacity);
    auto one = belady(trace, capacity, false), other = belady(trace, capacity, true);
    (one.hit > other.hit ? one : other).print("Belady", capacity);
    std::fflush(stdout);
  }
}
