// Policies of peers. Each has `has`, `touch` for a block that is there and `insert` for one that is
// not. One that looks at prompts has `ask`, which is told of each before its blocks are used.
#pragma once
#include "lists.hpp"

struct LRU {
  int capacity;
  Lists lists;
  LRU(int capacity, int numbers) : capacity(capacity), lists(numbers, 1) {}
  bool has(int block) const { return lists.of[block] >= 0; }
  void touch(int block) { lists.move(block, 0); }
  void insert(int block) {
    if (lists.size[0] >= capacity) lists.pop(0);
    lists.add(block, 0);
  }
};

struct FIFO : LRU {
  using LRU::LRU;
  void touch(int) {}
};

// Least frequently used; with `aging`, a newcomer starts at the count of the last victim (LFUDA).
struct LFU {
  int capacity;
  bool aging;
  long clock = 0, floor = 0;
  std::vector<long> count, worth, since;
  std::set<std::tuple<long, long, int>> order;
  LFU(int capacity, int numbers, bool aging = false)
      : capacity(capacity), aging(aging), count(numbers, 0), worth(numbers, 0), since(numbers, -1) {}
  bool has(int block) const { return since[block] >= 0; }
  void put(int block) {
    worth[block] = (aging ? floor : 0) + count[block];
    since[block] = clock++;
    order.insert({worth[block], since[block], block});
  }
  void touch(int block) {
    order.erase({worth[block], since[block], block});
    count[block]++;
    put(block);
  }
  void insert(int block) {
    if (int(order.size()) >= capacity) {
      auto [value, when, victim] = *order.begin();
      order.erase(order.begin());
      since[victim] = -1;
      if (aging) floor = value;
    }
    count[block] = 1;
    put(block);
  }
};

struct LFUDA : LFU {
  LFUDA(int capacity, int numbers) : LFU(capacity, numbers, true) {}
};

struct ARC {
  enum { RECENT, FREQUENT, RECENT_GHOST, FREQUENT_GHOST };
  int capacity;
  double target = 0;
  Lists lists;
  ARC(int capacity, int numbers) : capacity(capacity), lists(numbers, 4) {}
  bool has(int block) const { return lists.of[block] == RECENT || lists.of[block] == FREQUENT; }
  void touch(int block) { lists.move(block, FREQUENT); }
  int size(int list) const { return lists.size[list]; }
  void evict(bool was_frequent) {
    int recent = size(RECENT);
    bool from_recent = recent > target || (was_frequent && recent == target) || !size(FREQUENT);
    if (recent && from_recent) lists.add(lists.pop(RECENT), RECENT_GHOST);
    else lists.add(lists.pop(FREQUENT), FREQUENT_GHOST);
  }
  void insert(int block) {
    bool full = size(RECENT) + size(FREQUENT) >= capacity;
    int ghost = lists.of[block];
    if (ghost == RECENT_GHOST || ghost == FREQUENT_GHOST) {
      bool frequent = ghost == FREQUENT_GHOST;
      double other = size(frequent ? RECENT_GHOST : FREQUENT_GHOST);
      double step = std::max(1.0, other / std::max(1, size(ghost)));
      target = frequent ? std::max(0.0, target - step) : std::min<double>(capacity, target + step);
      if (full) evict(frequent);
      lists.move(block, FREQUENT);
      return;
    }
    int recents = size(RECENT) + size(RECENT_GHOST);
    int all = recents + size(FREQUENT) + size(FREQUENT_GHOST);
    if (recents >= capacity && size(RECENT) >= capacity) {
      lists.pop(RECENT);
    } else {
      if (recents >= capacity) lists.pop(RECENT_GHOST);
      else if (all >= 2 * capacity && size(FREQUENT_GHOST)) lists.pop(FREQUENT_GHOST);
      if (full) evict(false);
    }
    lists.add(block, RECENT);
  }
};

struct S3FIFO {
  enum { SMALL, MAIN, GHOST };
  int capacity, small, main;
  Lists lists;
  std::vector<uint8_t> uses;
  S3FIFO(int capacity, int numbers, double share)
      : capacity(capacity), small(std::max(1, int(capacity * share))), main(capacity - small),
        lists(numbers, 3), uses(numbers, 0) {}
  bool has(int block) const { return lists.of[block] == SMALL || lists.of[block] == MAIN; }
  void touch(int block) { uses[block] = std::min(3, uses[block] + 1); }
  void evict_main() {
    while (lists.size[MAIN]) {
      int block = lists.pop(MAIN);
      if (!uses[block]) return;
      uses[block]--;
      lists.add(block, MAIN);
    }
  }
  bool evict_small() {
    while (lists.size[SMALL]) {
      int block = lists.pop(SMALL);
      lists.add(block, uses[block] ? MAIN : GHOST);
      if (!uses[block]) {
        if (lists.size[GHOST] > main) lists.pop(GHOST);
        return true;
      }
      uses[block] = 0;
      if (lists.size[MAIN] > main) evict_main();
    }
    return false;
  }
  void insert(int block) {
    while (lists.size[SMALL] + lists.size[MAIN] >= capacity) {
      bool from_small = lists.size[SMALL] >= small || !lists.size[MAIN];
      if (!from_small || !evict_small()) evict_main();
    }
    if (lists.of[block] == GHOST) lists.move(block, MAIN);
    else lists.add(block, SMALL);
    uses[block] = 0;
  }
};

struct S3FIFO10 : S3FIFO {
  S3FIFO10(int capacity, int numbers) : S3FIFO(capacity, numbers, 0.1) {}
};
struct S3FIFO30 : S3FIFO {
  S3FIFO30(int capacity, int numbers) : S3FIFO(capacity, numbers, 0.3) {}
};
struct S3FIFO50 : S3FIFO {
  S3FIFO50(int capacity, int numbers) : S3FIFO(capacity, numbers, 0.5) {}
};

struct SIEVE {
  int capacity, hand = -1;
  Lists lists;
  std::vector<uint8_t> used;
  SIEVE(int capacity, int numbers) : capacity(capacity), lists(numbers, 1), used(numbers, 0) {}
  bool has(int block) const { return lists.of[block] >= 0; }
  void touch(int block) { used[block] = 1; }
  void insert(int block) {
    if (lists.size[0] >= capacity) {
      int at = hand >= 0 ? hand : lists.first[0];
      while (used[at]) {
        used[at] = 0;
        at = lists.next[at] >= 0 ? lists.next[at] : lists.first[0];
      }
      hand = lists.next[at];
      lists.remove(at);
    }
    used[block] = 0;
    lists.add(block, 0);
  }
};

struct SLRU {
  enum { PROBATION, PROTECTED };
  int capacity, limit;
  Lists lists;
  SLRU(int capacity, int numbers) : capacity(capacity), limit(capacity * 0.8), lists(numbers, 2) {}
  bool has(int block) const { return lists.of[block] >= 0; }
  void touch(int block) {
    lists.move(block, PROTECTED);
    if (lists.size[PROTECTED] > limit) lists.add(lists.pop(PROTECTED), PROBATION);
  }
  void insert(int block) {
    if (lists.size[0] + lists.size[1] >= capacity)
      lists.pop(lists.size[PROBATION] ? PROBATION : PROTECTED);
    lists.add(block, PROBATION);
  }
};

struct WTinyLFU {
  enum { PROBATION, PROTECTED, WINDOW };
  int window, main, limit;
  Lists lists;
  Counts counts;
  WTinyLFU(int capacity, int numbers)
      : window(std::max(1, capacity / 100)), main(capacity - window), limit(main * 0.8),
        lists(numbers, 3), counts(capacity, numbers) {}
  bool has(int block) const { return lists.of[block] >= 0; }
  void touch(int block) {
    counts.add(block);
    bool in_window = lists.of[block] == WINDOW;
    lists.move(block, in_window ? WINDOW : PROTECTED);
    if (lists.size[PROTECTED] > limit) lists.add(lists.pop(PROTECTED), PROBATION);
  }
  void insert(int block) {
    counts.add(block);
    lists.add(block, WINDOW);
    if (lists.size[WINDOW] <= window) return;
    int newcomer = lists.pop(WINDOW);
    if (lists.size[PROBATION] + lists.size[PROTECTED] >= main) {
      int victim = lists.first[lists.size[PROBATION] ? PROBATION : PROTECTED];
      if (victim < 0 || counts.of[newcomer] <= counts.of[victim]) return;
      lists.remove(victim);
    }
    lists.add(newcomer, PROBATION);
  }
};

// KVBM's MultiLRU: four levels of frequency.
struct MultiLRU {
  int capacity;
  Lists lists;
  Counts counts;
  MultiLRU(int capacity, int numbers)
      : capacity(capacity), lists(numbers, 4), counts(capacity, numbers) {}
  static int level(int count) { return count < 2 ? 0 : count < 6 ? 1 : count < 15 ? 2 : 3; }
  bool has(int block) const { return lists.of[block] >= 0; }
  void touch(int block) { lists.move(block, level(counts.add(block))); }
  void insert(int block) {
    if (lists.size[0] + lists.size[1] + lists.size[2] + lists.size[3] >= capacity)
      for (int list = 0; list < 4; list++)
        if (lists.size[list]) {
          lists.pop(list);
          break;
        }
    lists.add(block, level(counts.add(block)));
  }
};

// SGLang's T-LRU: blocks at the end of a history, which do not bring its next prompt below the
// limit, go first. Both settings are SGLang's, here in blocks: a limit of 8, 2 expected to be new.
struct TLRU {
  enum { SAFE, OTHER };
  int capacity;
  Lists lists;
  std::vector<int> length, depth;
  TLRU(int capacity, int numbers)
      : capacity(capacity), lists(numbers, 2), length(numbers, 0), depth(numbers, 0) {}
  void ask(const int32_t* blocks, int count) {
    for (int at = 0; at < count; at++) {
      depth[blocks[at]] = at;
      length[blocks[at]] = std::max(length[blocks[at]], count);
    }
  }
  bool has(int block) const { return lists.of[block] >= 0; }
  int list(int block) const { return depth[block] >= length[block] + 2 - 8 ? SAFE : OTHER; }
  void touch(int block) { lists.move(block, list(block)); }
  void insert(int block) {
    if (lists.size[0] + lists.size[1] >= capacity) lists.pop(lists.size[SAFE] ? SAFE : OTHER);
    lists.add(block, list(block));
  }
};

// Marconi's score of the leaves: recency, plus FLOPs saved a byte, both from 0 to 1. Its weight is
// tuned on the workload there; it is 1 here. Leaves of similar depth are in one order.
struct Marconi {
  static constexpr int BANDS = 16;
  int capacity, held = 0;
  long clock = 0;
  std::vector<int> parent, depth, children;
  std::vector<long> last;
  std::vector<char> in;
  std::set<std::pair<long, int>> leaves[BANDS];
  Marconi(int capacity, int numbers)
      : capacity(capacity), parent(numbers, -1), depth(numbers, 0), children(numbers, 0),
        last(numbers, 0), in(numbers, 0) {}
  static int band(int depth) { return std::min(BANDS - 1, int(2 * std::log2(depth + 1.0))); }
  void ask(const int32_t* blocks, int count) {
    for (int at = 0; at < count; at++) {
      parent[blocks[at]] = at ? blocks[at - 1] : -1;
      depth[blocks[at]] = at;
    }
  }
  bool has(int block) const { return in[block]; }
  void show(int block, bool leaf) {
    auto& order = leaves[band(depth[block])];
    if (leaf) order.insert({last[block], block});
    else order.erase({last[block], block});
  }
  void touch(int block) {
    if (!children[block]) show(block, false);
    last[block] = clock++;
    if (!children[block]) show(block, true);
  }
  void evict() {
    long oldest = clock;
    int deepest = 1;
    for (auto& order : leaves)
      if (!order.empty()) {
        oldest = std::min(oldest, order.begin()->first);
        deepest = std::max(deepest, depth[order.begin()->second]);
      }
    double least = 1e300;
    int victim = -1;
    for (auto& order : leaves) {
      if (order.empty()) continue;
      auto [when, block] = *order.begin();
      double recency = double(when - oldest) / std::max(1L, clock - oldest);
      double saved = (256.0 + depth[block]) / (256.0 + deepest);
      if (recency + saved < least) {
        least = recency + saved;
        victim = block;
      }
    }
    show(victim, false);
    in[victim] = 0;
    held--;
    int above = parent[victim];
    if (above >= 0 && --children[above] == 0 && in[above]) show(above, true);
  }
  void insert(int block) {
    if (held >= capacity) evict();
    last[block] = clock++;
    in[block] = 1;
    held++;
    int above = parent[block];
    if (above >= 0) {
      if (in[above] && !children[above]) show(above, false);
      children[above]++;
    }
    if (!children[block]) show(block, true);
  }
};
