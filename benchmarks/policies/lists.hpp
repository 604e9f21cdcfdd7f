// A trace, and lists of block numbers that all policies use.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <queue>
#include <set>
#include <string>
#include <tuple>
#include <vector>

// Requests of a trace; the blocks of all follow one another, numbered from 0.
struct Trace {
  std::vector<int32_t> blocks;
  std::vector<size_t> begins{0};
  int numbers = 0;

  size_t requests() const { return begins.size() - 1; }

  explicit Trace(const char* path) {
    FILE* file = std::fopen(path, "rb");
    if (!file) std::exit(1);
    int32_t count;
    while (std::fread(&count, 4, 1, file) == 1) {
      size_t begin = blocks.size();
      blocks.resize(begin + count);
      if (std::fread(&blocks[begin], 4, count, file) != size_t(count)) std::exit(1);
      begins.push_back(blocks.size());
    }
    std::fclose(file);
    for (int32_t block : blocks) numbers = std::max(numbers, block + 1);
  }
};

// Doubly linked lists, the oldest first; a block is in at most one of them.
struct Lists {
  std::vector<int> next, before, first, last, size;
  std::vector<int8_t> of;  // the list of a block, -1 if it is in none

  Lists(int numbers, int lists)
      : next(numbers, -1), before(numbers, -1), first(lists, -1), last(lists, -1),
        size(lists, 0), of(numbers, -1) {}

  void remove(int block) {
    int list = of[block];
    (before[block] < 0 ? first[list] : next[before[block]]) = next[block];
    (next[block] < 0 ? last[list] : before[next[block]]) = before[block];
    size[list]--;
    of[block] = -1;
  }

  void add(int block, int list) {
    of[block] = int8_t(list);
    before[block] = last[list];
    next[block] = -1;
    (last[list] < 0 ? first[list] : next[last[list]]) = block;
    last[list] = block;
    size[list]++;
  }

  void move(int block, int list) {
    remove(block);
    add(block, list);
  }

  int pop(int list) {
    int block = first[list];
    remove(block);
    return block;
  }
};

// Counts of uses up to 15, all halved each time that ten times the capacity were used.
struct Counts {
  std::vector<uint8_t> of;
  long uses = 0, limit;

  Counts(int capacity, int numbers) : of(numbers, 0), limit(10L * capacity) {}

  int add(int block) {
    if (of[block] < 15) of[block]++;
    if (++uses >= limit) {
      uses = 0;
      for (auto& count : of) count >>= 1;
    }
    return of[block];
  }
};
