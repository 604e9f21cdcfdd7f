/* The loops of kvladder/policy/panel.py and kvladder/policy/hazards.py in C.
 *
 * Each function does what the one of the same name does there, in the same order, so that both have
 * the same results to the last bit. Comments there say why; here they say only what differs: a
 * block is 20 bytes, lists are chains of handles, tables of keys are open addressing.
 */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the state is stored as little-endian doubles"
#endif

enum { LEVELS = 7, INTERVALS = 4, SESSION = LEVELS * INTERVALS };
enum { PROMPTS = SESSION + INTERVALS, CLASSES = PROMPTS + INTERVALS, FRONT = CLASSES };
enum { COUNT_MAX = 15, SAMPLE = 2048, BINS = 18, FORGET = 24, HALVE = 14, RULES = 6 };
enum { GHOSTS_MIN = 8192, TIMES_MAX = 64, EPOCH = 2, EPOCHS_MAX = 3, GENERATION = 4 };
enum { HAZARD, MULTI, RECENT, EITHER, PROMPT, LOOP };
enum { WAYS = 8, GHOSTS = 6, COUNT_LEVELS = LEVELS + 1, PRIORITIES = 101 };
enum { HELD = 0x10, ASKED = 0x20, LISTED = 0x40, IN_FRONT = 0x80 }; /* above the count */

static const int LEAST[LEVELS] = {1, 2, 3, 4, 6, 9, 15};
static const int COUNTS[COUNT_LEVELS] = {0, 1, 2, 3, 4, 6, 9, 15};
static const uint8_t HALVED[COUNT_LEVELS] = {0, 0, 1, 1, 2, 3, 4, 5};
static const int GROUP[LEVELS + 2] = {0, 1, 1, 1, 2, 2, 3, 0, 0};
static const double WHOLE = 1.0; /* hits that a whole prompt counts */
static const double EVEN = 0.99, MOST = 0.5;

typedef struct {
    int32_t next, prev;
    uint32_t last, low;
    uint8_t kind, priority, flags, high;
} Block;

typedef struct {
    uint64_t tag;
    uint32_t last;
    uint8_t kind, prompt, count, inside, live;
    int32_t next[RULES], prev[RULES];
} Sampled;

typedef struct {
    uint32_t then, what; /* index << 9 | class by prompt - SESSION << 6 | class */
} Use;

typedef struct {
    double score;
    uint32_t age;
    int kind;
} Rank;

typedef struct {
    PyObject_HEAD
    int64_t size, now;
    /* of the prompt that is asked for now */
    int64_t prompt_age;
    int prompt_interval, in_session;
    /* Hazards */
    double edges[BINS], hits[CLASSES][BINS], reached[CLASSES][BINS], worth[CLASSES][BINS];
    int learned;
    /* Learner */
    int64_t rate, forget, shadow_size, held_by[RULES], learn_at, halve_at, choose_at, fade_at;
    double ahead[RULES][RULES], spread[RULES][RULES];
    int rule, leader;
    double served[RULES], wanted;
    Sampled *sampled;
    int32_t *sampled_map, sampled_room, sampled_free, sampled_made;
    int64_t sampled_map_size, sampled_count;
    int32_t shadow_head[RULES][CLASSES], shadow_tail[RULES][CLASSES];
    Use *log;
    uint64_t log_room, log_end, passed[BINS + 1];
    /* Ghosts */
    uint16_t *ghosts;
    int64_t memory, buckets, epoch;
    /* SeenOnce */
    uint64_t *seen, *seen_before;
    int64_t words, began;
    /* PythonPanel */
    Block *blocks;
    int64_t room, listed;
    int32_t head[PRIORITIES][CLASSES + 1], tail[PRIORITIES][CLASSES + 1];
    uint64_t used[PRIORITIES];
} Panel;

static int interval_of(int64_t age, int64_t size) {
    return (4 * age < size) + (age < size) + (age < 4 * size);
}

static int class_of(int count, int interval) {
    int level = -1;
    for (int at = 0; at < LEVELS; at++) level += count >= LEAST[at];
    return level * INTERVALS + interval;
}

static int class_now(const Panel *self, int count, int64_t age) {
    return class_of(count, count > 1 ? interval_of(age, self->size) : self->prompt_interval);
}

/* Its class by prompt. */
static int prompt_now(const Panel *self) {
    return (self->in_session ? SESSION : PROMPTS) + self->prompt_interval;
}

/* The class by which the level's blocks are ordered now. */
static int kind_now(const Panel *self, int count, int64_t age) {
    return self->rule >= PROMPT ? prompt_now(self) : class_now(self, count, age);
}

static int takes_newest(int rule) { return rule == EITHER || rule == LOOP; }

/* ---- Hazards */

static int bin_of(const Panel *self, double age) {
    int found = 0;
    while (found + 1 < BINS && age >= self->edges[found + 1]) found++;
    return found;
}

static void raise_to(Panel *self, int at, int least) {
    for (int age = 0; age < BINS; age++)
        if (self->worth[least][age] > self->worth[at][age])
            self->worth[at][age] = self->worth[least][age];
}

static void learn_one(Panel *self, int one, const double *every, const double *widths) {
    double rates[BINS];
    for (int age = 0; age < BINS; age++) {
        double hits = self->hits[one][age], reached = self->reached[one][age];
        double rate = (hits + 4.0 * every[age]) / ((hits > reached ? hits : reached) + 4.0);
        rates[age] = rate < 0.999 ? rate : 0.999;
    }
    for (int start = 0; start < BINS; start++) {
        double left = 1.0, hits = 0.0, time = 0.0, best = 0.0;
        for (int age = start; age < BINS; age++) {
            hits += left * rates[age];
            time += left * widths[age] * (1.0 - rates[age] * 0.5);
            left *= 1.0 - rates[age];
            if (hits / time > best) best = hits / time;
        }
        self->worth[one][start] = best;
    }
}

static void learn(Panel *self) {
    double every[BINS], widths[BINS];
    for (int age = 0; age < BINS; age++) {
        double hits = 0.0, reached = 0.0;
        for (int one = 0; one < SESSION; one++) {
            hits += self->hits[one][age];
            reached += self->reached[one][age];
        }
        every[age] = reached > 0 ? (hits / reached < 1.0 ? hits / reached : 1.0) : 0.0;
        widths[age] = age + 1 < BINS ? self->edges[age + 1] - self->edges[age]
                                     : self->edges[age] * 0.4;
    }
    for (int one = 0; one < CLASSES; one++) learn_one(self, one, every, widths);
    for (int level = 0; level < LEVELS; level++)
        for (int shorter = 0; shorter < INTERVALS; shorter++) {
            int at = level * INTERVALS + shorter;
            if (shorter && level) raise_to(self, at, at - 1);
            if (level) raise_to(self, at, at - INTERVALS);
        }
    self->learned = 1;
}

static double score(const Panel *self, int one, uint32_t age) {
    if (!self->learned) return 1.0 / ((double)age + 1.0);
    int low = bin_of(self, age);
    const double *worth = self->worth[one], *edges = self->edges;
    if (low + 1 >= BINS) return worth[low] * edges[low] / (age > edges[low] ? age : edges[low]);
    double width = edges[low + 1] - edges[low];
    double step = (age - edges[low]) / (width > 1.0 ? width : 1.0);
    return worth[low] + (worth[low + 1] - worth[low]) * step;
}

static Rank rank_of(const Panel *self, int rule, int one, uint32_t age) {
    Rank rank = {0.0, age, one};
    if (rule == MULTI) rank.score = GROUP[one / INTERVALS];
    else if (rule != RECENT) rank.score = score(self, one, age);
    return rank;
}

static int before(Rank one, Rank other) {
    if (one.score != other.score) return one.score < other.score;
    if (one.age != other.age) return one.age > other.age;
    return one.kind < other.kind;
}

/* ---- Learner */

static int samples(const Panel *self, uint32_t low) {
    return self->rate == 1 || ((uint32_t)(low * 2654435761u) >> 8) % self->rate == 0;
}

static int64_t sampled_home(const Panel *self, uint64_t tag) {
    uint32_t mixed = (uint32_t)((tag ^ tag >> 29) * 0x9E3779B97F4A7C15ull >> 32);
    return (int64_t)((uint64_t)mixed * (uint64_t)self->sampled_map_size >> 32);
}

/* The place of a tag in the map, or the empty place where it would be. */
static int64_t sampled_place(const Panel *self, uint64_t tag) {
    int64_t at = sampled_home(self, tag);
    while (self->sampled_map[at] >= 0 && self->sampled[self->sampled_map[at]].tag != tag)
        if (++at == self->sampled_map_size) at = 0;
    return at;
}

static int32_t find_sampled(const Panel *self, uint64_t tag) {
    return self->sampled_map[sampled_place(self, tag)];
}

static int grow_sampled(Panel *self) {
    int64_t room = self->sampled_room + self->sampled_room / 2 + 64, size = room + room / 2;
    if (room >= 1 << 23) return -1;
    Sampled *sampled = PyMem_RawRealloc(self->sampled, room * sizeof(Sampled));
    if (!sampled) return -1;
    self->sampled = sampled;
    int32_t *map = PyMem_RawRealloc(self->sampled_map, size * sizeof(int32_t));
    if (!map) return -1;
    self->sampled_map = map;
    self->sampled_map_size = size;
    self->sampled_room = (int32_t)room;
    for (int64_t at = 0; at < size; at++) map[at] = -1;
    for (int32_t at = 0; at < self->sampled_made; at++)
        if (sampled[at].live) map[sampled_place(self, sampled[at].tag)] = at;
    return 0;
}

/* A new sampled key, -1 without memory. */
static int32_t make_sampled(Panel *self, uint64_t tag) {
    if (self->sampled_free < 0 && self->sampled_made == self->sampled_room &&
        grow_sampled(self) < 0)
        return -1;
    int32_t index = self->sampled_free;
    if (index >= 0)
        self->sampled_free = self->sampled[index].next[0];
    else
        index = self->sampled_made++;
    self->sampled[index] = (Sampled){.tag = tag, .live = 1};
    self->sampled_map[sampled_place(self, tag)] = index;
    return index;
}

static void delete_sampled(Panel *self, int32_t index) {
    int64_t size = self->sampled_map_size, hole = sampled_place(self, self->sampled[index].tag);
    int64_t at = hole;
    for (;;) { /* close the gap */
        if (++at == size) at = 0;
        int32_t other = self->sampled_map[at];
        if (other < 0) break;
        int64_t home = sampled_home(self, self->sampled[other].tag);
        if ((at - home + size) % size >= (at - hole + size) % size) {
            self->sampled_map[hole] = other;
            hole = at;
        }
    }
    self->sampled_map[hole] = -1;
    self->sampled[index].live = 0;
    self->sampled[index].next[0] = self->sampled_free;
    self->sampled_free = index;
}

static int shadow_kind(const Sampled *one, int rule) {
    return rule >= PROMPT ? one->prompt : one->kind;
}

static void shadow_unlink(Panel *self, int rule, int32_t index) {
    Sampled *one = &self->sampled[index];
    int kind = shadow_kind(one, rule);
    int32_t next = one->next[rule], prev = one->prev[rule];
    if (prev < 0) self->shadow_head[rule][kind] = next;
    else self->sampled[prev].next[rule] = next;
    if (next < 0) self->shadow_tail[rule][kind] = prev;
    else self->sampled[next].prev[rule] = prev;
}

static void shadow_link(Panel *self, int rule, int32_t index) {
    Sampled *one = &self->sampled[index];
    int kind = shadow_kind(one, rule);
    int32_t last = self->shadow_tail[rule][kind];
    one->prev[rule] = last;
    one->next[rule] = -1;
    if (last < 0) self->shadow_head[rule][kind] = index;
    else self->sampled[last].next[rule] = index;
    self->shadow_tail[rule][kind] = index;
}

static void shadow_leave(Panel *self, int rule, int32_t index) {
    Sampled *one = &self->sampled[index];
    shadow_unlink(self, rule, index);
    one->inside &= ~(1 << rule);
    if (!one->inside && (uint32_t)self->now - one->last >= self->forget)
        delete_sampled(self, index);
}

static void shadow_evict(Panel *self, int rule) {
    Rank best = {0.0, 0, -1};
    int32_t victim = -1;
    for (int kind = 0; kind < CLASSES; kind++) {
        int32_t index = self->shadow_head[rule][kind];
        if (index < 0) continue;
        Rank rank =
            rank_of(self, rule, kind, (uint32_t)self->now - self->sampled[index].last);
        if (victim < 0 || before(rank, best)) {
            best = rank;
            victim = index;
        }
        if (rule == MULTI && rank.score > best.score) break; /* so are those that follow */
    }
    for (int kind = 0; takes_newest(rule) && kind < CLASSES; kind++) {
        int32_t index = self->shadow_tail[rule][kind];
        if (index < 0) continue;
        Rank rank = rank_of(self, rule, kind, (uint32_t)self->now - self->sampled[index].last);
        if (before(rank, best)) {
            best = rank;
            victim = index;
        }
    }
    shadow_leave(self, rule, victim);
}

static int log_use(Panel *self, int32_t index) {
    const Sampled *one = &self->sampled[index];
    uint32_t kinds = (uint32_t)(one->prompt - SESSION) << 6 | one->kind;
    uint64_t gone = self->passed[BINS];
    if (self->log_end - gone == self->log_room) {
        uint64_t room = self->log_room ? 2 * self->log_room : 1024;
        Use *log = PyMem_RawMalloc(room * sizeof(Use));
        if (!log) return -1;
        for (uint64_t at = gone; at < self->log_end; at++)
            log[at & (room - 1)] = self->log[at & (self->log_room - 1)];
        PyMem_RawFree(self->log);
        self->log = log;
        self->log_room = room;
    }
    self->log[self->log_end++ & (self->log_room - 1)] =
        (Use){(uint32_t)self->now, (uint32_t)index << 9 | kinds};
    return 0;
}

static void reach(Panel *self) {
    for (int age = 1; age <= BINS; age++) {
        double edge = age < BINS ? self->edges[age] : (double)self->forget;
        for (; self->passed[age] < self->log_end; self->passed[age]++) {
            Use use = self->log[self->passed[age] & (self->log_room - 1)];
            if ((uint32_t)self->now - use.then < edge) break;
            Sampled *one = &self->sampled[use.what >> 9];
            if (!one->live || one->last != use.then) continue;
            int kind = use.what & 63, prompt = SESSION + (use.what >> 6 & 7);
            if (age < BINS) {
                self->reached[kind][age] += 1.0;
                self->reached[prompt][age] += 1.0;
            } else if (!one->inside) {
                delete_sampled(self, (int32_t)(use.what >> 9));
            }
        }
    }
}

static int use_sampled(Panel *self, uint64_t tag, int kind) {
    int32_t index = find_sampled(self, tag);
    if (index < 0 && (index = make_sampled(self, tag)) < 0) return -1;
    uint8_t inside = self->sampled[index].inside;
    uint32_t age = (uint32_t)self->now - self->sampled[index].last;
    for (int rule = 0; rule < RULES; rule++) {
        if (inside >> rule & 1) shadow_unlink(self, rule, index);
        else if (self->held_by[rule] >= self->shadow_size) shadow_evict(self, rule);
        else self->held_by[rule]++;
    }
    Sampled *one = &self->sampled[index];
    if (one->count && age < FORGET * self->size) {
        int bin = bin_of(self, age);
        self->hits[one->kind][bin] += 1.0;
        self->hits[one->prompt][bin] += 1.0;
    }
    int64_t period = HALVE * self->size, last = self->now - age;
    int64_t halved = one->count ? self->now / period - last / period : 0;
    one->count >>= halved < COUNT_MAX ? halved : COUNT_MAX;
    if (one->count < COUNT_MAX) one->count++;
    one->kind = (uint8_t)kind;
    one->prompt = (uint8_t)prompt_now(self);
    one->last = (uint32_t)self->now;
    self->reached[one->kind][0] += 1.0;
    self->reached[one->prompt][0] += 1.0;
    one->inside = (1 << RULES) - 1;
    for (int rule = 0; rule < RULES; rule++) shadow_link(self, rule, index);
    if (log_use(self, index) < 0) return -1;
    reach(self);
    return 0;
}

static void leave_shadows(Panel *self, uint64_t tag) {
    int32_t index = find_sampled(self, tag);
    if (index < 0) return;
    uint8_t inside = self->sampled[index].inside;
    for (int rule = 0; rule < RULES; rule++)
        if (inside >> rule & 1) {
            shadow_leave(self, rule, index);
            self->held_by[rule]--;
        }
}

/* Order by the leader, or by recency where that serves as much. */
static void settle(Panel *self) {
    double served = self->served[RECENT];
    int is_even = served >= MOST * self->wanted && served >= EVEN * self->served[self->leader];
    self->rule = is_even && self->wanted > 0 ? RECENT : self->leader;
}

static void choose(Panel *self) {
    int current = self->leader;
    double best = 0.0;
    for (int rule = 0; rule < RULES; rule++) {
        double ahead = self->ahead[rule][current], spread = self->spread[rule][current];
        double least = sqrt(spread);
        if (rule != HAZARD) least = 2.0 * least + (double)self->shadow_size / 64.0;
        if (spread > 0 && ahead > least && ahead > best) {
            best = ahead;
            self->leader = rule;
        }
    }
    settle(self);
}

static void tick(Panel *self) {
    int64_t now = self->now, size = self->size;
    if (now >= self->learn_at) {
        self->learn_at = now + (size / 16 > 64 ? size / 16 : 64);
        learn(self);
    }
    if (now >= self->halve_at) {
        self->halve_at = now + 256 * size;
        for (int one = 0; one < CLASSES; one++)
            for (int age = 0; age < BINS; age++) {
                self->hits[one][age] *= 0.5;
                self->reached[one][age] *= 0.5;
            }
    }
    if (now >= self->choose_at) {
        self->choose_at = now + (size / 20 > 200 ? size / 20 : 200);
        choose(self);
    }
    if (now >= self->fade_at) {
        self->fade_at = now + 64 * size;
        self->wanted *= 0.5;
        for (int one = 0; one < RULES; one++) self->served[one] *= 0.5;
        for (int one = 0; one < RULES; one++)
            for (int other = 0; other < RULES; other++) {
                self->ahead[one][other] *= 0.5;
                self->spread[one][other] *= 0.5;
            }
    }
}

/* ---- SeenOnce */

static uint64_t seen_at(const Panel *self, uint64_t tag, int64_t *at) {
    uint64_t mixed = tag * 0x9E3779B97F4A7C15ull >> 46;
    *at = (int64_t)((uint64_t)(uint32_t)tag * (uint64_t)self->words >> 32);
    return 1ull << (mixed & 63) | 1ull << (mixed >> 6 & 63) | 1ull << (mixed >> 12);
}

static int64_t seen_age(const Panel *self, uint64_t tag) {
    int64_t at;
    uint64_t bits = seen_at(self, tag, &at);
    int64_t part = self->now - self->began;
    if ((self->seen[at] & bits) == bits) return part / 2 + 1;
    return (self->seen_before[at] & bits) == bits ? part + GENERATION * self->memory / 2 : 0;
}

static void add_seen(Panel *self, uint64_t tag, int64_t last) {
    int64_t at;
    uint64_t bits = seen_at(self, tag, &at);
    if (last >= self->began) self->seen[at] |= bits;
    else if (last >= self->began - GENERATION * self->memory) self->seen_before[at] |= bits;
}

/* ---- Ghosts */

static uint16_t *ghost_bucket(const Panel *self, uint64_t tag, unsigned *bits) {
    *bits = ((unsigned)tag ^ (unsigned)(tag >> 32)) & 0x7F;
    return self->ghosts + ((uint64_t)(uint32_t)tag * (uint64_t)self->buckets >> 32) * WAYS;
}

static uint16_t *find_ghost(const Panel *self, uint64_t tag) {
    unsigned bits;
    uint16_t *bucket = ghost_bucket(self, tag, &bits);
    for (int at = 0; at < WAYS; at++)
        if (bucket[at] & 7 && bucket[at] >> 9 == (int)bits) return bucket + at;
    return NULL;
}

static int ghost_count(const Panel *self, uint64_t tag) {
    const uint16_t *found = find_ghost(self, tag);
    return found ? COUNTS[*found & 7] : seen_age(self, tag) > 0;
}

typedef struct {
    int count, interval, awaited, is_halved, in_session;
    int64_t age;
} Ghost;

static int64_t ghost_age(const Panel *self, unsigned entry) {
    int64_t length = EPOCH * self->size, part = self->now - self->epoch * length;
    int64_t epochs = entry >> 6 & 3;
    return epochs ? epochs * length + part - length / 2 : part / 2;
}

static Ghost take_ghost(Panel *self, uint64_t tag) {
    uint16_t *found = find_ghost(self, tag);
    if (!found) {
        int64_t age = seen_age(self, tag);
        return (Ghost){.count = age > 0, .age = age};
    }
    unsigned entry = *found;
    *found = 0;
    return (Ghost){.count = COUNTS[entry & 7],
                   .interval = entry >> 3 & 3,
                   .is_halved = 1,
                   .in_session = entry >> 8 & 1,
                   .awaited = entry >> 5 & 1,
                   .age = ghost_age(self, entry)};
}

static void put_ghost(Panel *self, uint64_t tag, int64_t last, int count, int kind, int awaited) {
    add_seen(self, tag, last);
    if (count < 2 && !awaited) return;
    unsigned bits, level = 0, least = COUNT_LEVELS, oldest = 0, found = 0;
    uint16_t *bucket = ghost_bucket(self, tag, &bits);
    while (level + 1 < COUNT_LEVELS && count >= COUNTS[level + 1]) level++;
    for (unsigned at = 0; at < WAYS; at++) {
        unsigned left = bucket[at] & 7, age = left ? bucket[at] >> 6 & 3 : 0;
        if (left < least || (left == least && age > oldest)) {
            found = at;
            least = left;
            oldest = age;
        }
        if (!left) break;
    }
    int64_t length = EPOCH * self->size, began = self->epoch * length;
    int64_t epochs = last < began ? 1 + (began - 1 - last) / length : 0;
    unsigned age = epochs < EPOCHS_MAX ? (unsigned)epochs : EPOCHS_MAX;
    unsigned interval = (unsigned)kind % INTERVALS;
    bucket[found] =
        (uint16_t)(bits << 9 | (unsigned)(kind / INTERVALS == LEVELS) << 8 | age << 6 |
                   (unsigned)awaited << 5 | interval << 3 | level);
}

static void tick_ghosts(Panel *self) {
    if (self->now >= self->began + GENERATION * self->memory) {
        uint64_t *older = self->seen_before;
        self->began = self->now;
        self->seen_before = self->seen;
        self->seen = older;
        memset(older, 0, (size_t)self->words * sizeof *older);
    }
    if (self->now < (self->epoch + 1) * EPOCH * self->size) return;
    int halves = ++self->epoch % (HALVE / EPOCH) == 0;
    for (int64_t at = 0; at < self->buckets * WAYS; at++) {
        unsigned entry = self->ghosts[at], level = halves ? HALVED[entry & 7] : entry & 7;
        unsigned age = (entry >> 6 & 3) < EPOCHS_MAX ? (entry >> 6 & 3) + 1 : EPOCHS_MAX;
        self->ghosts[at] = (uint16_t)(level ? (entry & 0xFF38) | age << 6 | level : 0);
    }
}

/* ---- the blocks of the level */

static uint64_t tag_of(const Block *one) { return (uint64_t)one->high << 32 | one->low; }

static int list_of(const Block *one) { return one->flags & IN_FRONT ? FRONT : one->kind; }

static void unlink_block(Panel *self, Block *one) {
    int priority = one->priority, list = list_of(one);
    if (one->prev < 0) self->head[priority][list] = one->next;
    else self->blocks[one->prev].next = one->next;
    if (one->next < 0) self->tail[priority][list] = one->prev;
    else self->blocks[one->next].prev = one->prev;
    if (self->head[priority][list] < 0) self->used[priority] &= ~(1ull << list);
    one->flags &= ~(LISTED | IN_FRONT);
    self->listed--;
}

static void link_block(Panel *self, Block *one, int front) {
    int priority = one->priority;
    int32_t handle = (int32_t)(one - self->blocks);
    one->flags |= front ? LISTED | IN_FRONT : LISTED;
    int list = list_of(one);
    int32_t first = self->head[priority][list], last = self->tail[priority][list];
    one->prev = front ? -1 : last;
    one->next = front ? first : -1;
    if (first < 0) {
        self->head[priority][list] = self->tail[priority][list] = handle;
        self->used[priority] |= 1ull << list;
    } else if (front) {
        self->blocks[first].prev = handle;
        self->head[priority][list] = handle;
    } else {
        self->blocks[last].next = handle;
        self->tail[priority][list] = handle;
    }
    self->listed++;
}

static int next_count(Panel *self, int count, int64_t *age, int is_halved) {
    self->now++;
    int64_t period = HALVE * self->size;
    if (count) {
        *age = *age + 1 < self->now ? *age + 1 : self->now;
        int64_t halved = self->now / period - (self->now - *age) / period;
        if (!is_halved) count >>= halved < COUNT_MAX ? halved : COUNT_MAX;
    }
    return count < COUNT_MAX ? count + 1 : COUNT_MAX;
}

static int note_use(Panel *self, uint64_t tag, int count, int64_t age) {
    tick_ghosts(self);
    if (samples(self, (uint32_t)tag) && use_sampled(self, tag, class_now(self, count, age)) < 0) {
        PyErr_NoMemory();
        return -1;
    }
    tick(self);
    return 0;
}

static int use_block(Panel *self, Block *one) {
    int64_t age = (uint32_t)((uint32_t)self->now - one->last);
    int count = next_count(self, one->flags & COUNT_MAX, &age, 0), listed = one->flags & LISTED;
    if (listed) unlink_block(self, one);
    one->flags = (uint8_t)((one->flags & ~COUNT_MAX) | count);
    one->kind = (uint8_t)kind_now(self, count, age);
    one->last = (uint32_t)self->now;
    if (listed) link_block(self, one, 0);
    return note_use(self, tag_of(one), count, age);
}

static int count_of(const Panel *self, uint64_t tag, const Block *one) {
    int count = 0;
    uint32_t last = 0;
    if (one) {
        count = one->flags & COUNT_MAX;
        last = one->last;
    } else if (self->rate == 1) {
        int32_t index = find_sampled(self, tag);
        if (index < 0) return 0;
        count = self->sampled[index].count;
        last = self->sampled[index].last;
    } else {
        return ghost_count(self, tag);
    }
    int64_t period = HALVE * self->size;
    int64_t then = self->now - (uint32_t)((uint32_t)self->now - last);
    int64_t halved = self->now / period - then / period;
    return count >> (halved < COUNT_MAX ? halved : COUNT_MAX);
}

/* If all keys are sampled, what is known of them takes the place of what a ghost says. */
static int recollect(const Panel *self, uint64_t tag, Ghost *known) {
    if (self->rate > 1) return -1;
    int32_t index = find_sampled(self, tag);
    const Sampled *one = index < 0 ? NULL : &self->sampled[index];
    known->is_halved = 0;
    known->count = one ? one->count : 0;
    known->age = one ? (uint32_t)((uint32_t)self->now - one->last) : 0;
    if (!one) return self->rule >= PROMPT ? PROMPTS : 0;
    return shadow_kind(one, self->rule);
}

static int await_key(Panel *self, uint64_t tag, int before) {
    Ghost known = {0};
    if (before) known = take_ghost(self, tag);
    recollect(self, tag, &known);
    if (known.count < before && self->rate > 1) {
        if (!known.count) known.age = self->prompt_age;
        known.count = before;
        known.is_halved = 1;
    }
    int count = next_count(self, known.count, &known.age, known.is_halved);
    if (count > before + 1) count = before + 1;
    int kind = kind_now(self, count, known.age);
    if (note_use(self, tag, count, known.age) < 0) return -1;
    put_ghost(self, tag, self->now, count, kind, 1);
    return 0;
}

static int reserve_blocks(Panel *self, int64_t count) {
    if (count <= self->room) return 0;
    int64_t more = self->room + (self->room < 1 << 16 ? self->room : 1 << 16) + 64;
    if (count < more) count = more;
    Block *blocks = count < INT32_MAX ? PyMem_RawRealloc(self->blocks, count * sizeof(Block)) : 0;
    if (!blocks) {
        PyErr_NoMemory();
        return -1;
    }
    memset(blocks + self->room, 0, (size_t)(count - self->room) * sizeof(Block));
    self->blocks = blocks;
    self->room = count;
    return 0;
}

/* ---- arguments */

/* Handles of a sequence, in memory that the caller frees; NULL with an error set. */
static int32_t *handles_of(PyObject *given, Py_ssize_t *count) {
    Py_buffer view;
    int32_t *found = NULL;
    if (PyObject_CheckBuffer(given) && !PyBytes_Check(given)) {
        if (PyObject_GetBuffer(given, &view, PyBUF_CONTIG_RO | PyBUF_FORMAT) < 0) return NULL;
        if (view.itemsize == 4 && view.format && !strcmp(view.format, "i")) {
            *count = view.len / 4;
            found = PyMem_RawMalloc((size_t)view.len + 4);
            if (found) memcpy(found, view.buf, (size_t)view.len);
            else PyErr_NoMemory();
            PyBuffer_Release(&view);
            return found;
        }
        PyBuffer_Release(&view);
    }
    PyObject *items = PySequence_Fast(given, "expected handles");
    if (!items) return NULL;
    *count = PySequence_Fast_GET_SIZE(items);
    found = PyMem_RawMalloc((size_t)*count * 4 + 4);
    if (!found) PyErr_NoMemory();
    for (Py_ssize_t at = 0; found && at < *count; at++) {
        Py_ssize_t handle = PyNumber_AsSsize_t(PySequence_Fast_GET_ITEM(items, at), PyExc_IndexError);
        if (handle < 0 || handle >= INT32_MAX - 1) {
            if (!PyErr_Occurred()) PyErr_Format(PyExc_IndexError, "no handle: %zd", handle);
            PyMem_RawFree(found);
            found = NULL;
        } else {
            found[at] = (int32_t)handle;
        }
    }
    Py_DECREF(items);
    return found;
}

/* The tag of a key; ~0 with an error set. */
static uint64_t tag_of_key(PyObject *key) {
    if (!PyBytes_Check(key) || PyBytes_GET_SIZE(key) < 5) {
        PyErr_SetString(PyExc_TypeError, "expected keys of 5 bytes or more");
        return ~(uint64_t)0;
    }
    const unsigned char *bytes = (const unsigned char *)PyBytes_AS_STRING(key);
    uint32_t low;
    memcpy(&low, bytes, 4);
    return (uint64_t)bytes[4] << 32 | low;
}

/* The block of a handle if it is held, and listed or not as said; NULL with an error set. */
static Block *block_of(Panel *self, int64_t handle, int listed) {
    Block *one = handle >= 0 && handle < self->room ? &self->blocks[handle] : NULL;
    if (one && one->flags & HELD && !(one->flags & LISTED) == !listed) return one;
    PyErr_Format(PyExc_AssertionError, "handle %lld is %s", (long long)handle,
                 one && one->flags & HELD ? (listed ? "not in the policy" : "in the policy")
                                          : "not held");
    return NULL;
}

static int require(Py_ssize_t count, Py_ssize_t expected) {
    if (count == expected) return 1;
    PyErr_Format(PyExc_TypeError, "%zd arguments: expected %zd", count, expected);
    return 0;
}

/* ---- methods */

/* The block of a place, NULL for None or with an error set. */
static Block *block_at(Panel *self, PyObject *place) {
    if (place == Py_None) return NULL;
    Py_ssize_t handle = PyNumber_AsSsize_t(place, PyExc_IndexError);
    if (handle >= 0 && handle < self->room && self->blocks[handle].flags & HELD)
        return &self->blocks[handle];
    if (!PyErr_Occurred()) PyErr_Format(PyExc_AssertionError, "handle %zd is not held", handle);
    return NULL;
}

typedef struct {
    uint64_t tag;
    int64_t handle; /* -1: absent */
    int count;
} Asked;

/* About how many uses ago a key was used. */
static int64_t age_of(const Panel *self, Asked one) {
    uint32_t now = (uint32_t)self->now;
    if (one.handle >= 0) return (uint32_t)(now - self->blocks[one.handle].last);
    if (self->rate == 1) {
        int32_t index = find_sampled(self, one.tag);
        return index < 0 ? 0 : (uint32_t)(now - self->sampled[index].last);
    }
    const uint16_t *found = find_ghost(self, one.tag);
    return found ? ghost_age(self, *found) : seen_age(self, one.tag);
}

/* Count the hits of the shadows, and the uses of each key. */
static void compare(Panel *self, Asked *asked, Py_ssize_t count) {
    int hits[RULES] = {0}, going = (1 << RULES) - 1, any = 0, known = 0, is_known = 1;
    for (Py_ssize_t at = 0; at < count; at++) {
        uint64_t tag = asked[at].tag;
        int64_t handle = asked[at].handle;
        asked[at].count = count_of(self, tag, handle < 0 ? NULL : &self->blocks[handle]);
        if (!samples(self, (uint32_t)tag)) continue;
        any = 1;
        self->wanted += 1.0;
        int32_t index = is_known ? find_sampled(self, tag) : -1;
        going &= index < 0 ? 0 : self->sampled[index].inside;
        known += is_known = index >= 0;
        for (int rule = 0; rule < RULES; rule++) hits[rule] += going >> rule & 1;
    }
    for (int one = 0; one < RULES; one++) self->served[one] += hits[one];
    for (int one = 0; any && one < RULES; one++)
        for (int other = 0; other < RULES; other++) {
            double ahead = hits[one] - hits[other];
            if (known) ahead += WHOLE * ((hits[one] == known) - (hits[other] == known));
            self->ahead[one][other] += ahead;
            self->spread[one][other] += ahead * ahead;
        }
}

/* Correct the counts by those before and behind them, and note the prompt's age and interval. */
static void correct_counts(Panel *self, Asked *asked, Py_ssize_t count) {
    Py_ssize_t deepest = -1;
    int most = COUNT_MAX;
    for (Py_ssize_t at = 0; at < count; at++) {
        int least = 0;
        if (at + 2 < count)
            least = asked[at + (asked[at + 2].count < asked[at + 1].count ? 2 : 1)].count;
        if (least > asked[at].count) asked[at].count = least;
        if (asked[at].count < most) most = asked[at].count;
        asked[at].count = most;
        if (most) deepest = at;
    }
    self->prompt_age = deepest < 0 ? 0 : age_of(self, asked[deepest]);
    self->prompt_interval = deepest < 0 ? 0 : interval_of(self->prompt_age, self->size);
}

/* Count a use of each key that is asked for; -1 with an error set. */
static int ask(Panel *self, Asked *asked, Py_ssize_t count, int in_session) {
    int failed = 0;
    compare(self, asked, count);
    correct_counts(self, asked, count);
    self->in_session = in_session;
    for (Py_ssize_t at = count - 1; !failed && at >= 0; at--) {
        if (asked[at].handle < 0) {
            failed = await_key(self, asked[at].tag, asked[at].count) < 0;
        } else {
            Block *one = &self->blocks[asked[at].handle];
            failed = use_block(self, one) < 0;
            one->flags |= ASKED;
        }
    }
    self->prompt_interval = self->in_session = 0;
    return failed ? -1 : 0;
}

static PyObject *requested(Panel *self, PyObject *const *given, Py_ssize_t given_count) {
    if (!require(given_count, 3)) return NULL;
    int in_session = PyObject_IsTrue(given[2]);
    if (in_session < 0) return NULL;
    PyObject *keys = PySequence_Fast(given[0], "expected keys");
    PyObject *places = keys ? PySequence_Fast(given[1], "expected places") : NULL;
    Py_ssize_t count = keys ? PySequence_Fast_GET_SIZE(keys) : 0;
    Asked *asked = NULL;
    int failed = !places;
    if (!failed && PySequence_Fast_GET_SIZE(places) != count) {
        PyErr_SetString(PyExc_ValueError, "not as many places as keys");
        failed = 1;
    }
    if (!failed && !(asked = PyMem_RawMalloc((size_t)count * sizeof *asked + 8))) {
        PyErr_NoMemory();
        failed = 1;
    }
    for (Py_ssize_t at = 0; !failed && at < count; at++) {
        uint64_t tag = tag_of_key(PySequence_Fast_GET_ITEM(keys, at));
        Block *one = block_at(self, PySequence_Fast_GET_ITEM(places, at));
        asked[at] = (Asked){tag, one ? one - self->blocks : -1, 0};
        failed = PyErr_Occurred() != NULL;
    }
    failed = failed || ask(self, asked, count, in_session) < 0;
    PyMem_RawFree(asked);
    Py_XDECREF(keys);
    Py_XDECREF(places);
    if (failed) return NULL;
    Py_RETURN_NONE;
}

static int insert_one(Panel *self, int32_t handle, uint64_t tag, int by_request) {
    if (tag == ~(uint64_t)0 || reserve_blocks(self, (int64_t)handle + 1) < 0) return -1;
    Block *one = &self->blocks[handle];
    if (one->flags & HELD) {
        PyErr_Format(PyExc_AssertionError, "handle %d is held", handle);
        return -1;
    }
    *one = (Block){.low = (uint32_t)tag, .high = (uint8_t)(tag >> 32)};
    Ghost known = take_ghost(self, tag);
    int kind = known.count ? class_of(known.count, known.interval) : 0;
    if (self->rule >= PROMPT) kind = (known.in_session ? SESSION : PROMPTS) + known.interval;
    int exact = recollect(self, tag, &known), count = known.count > 1 ? known.count : 1;
    if (exact >= 0) kind = exact;
    if (by_request && !known.awaited) {
        count = next_count(self, known.count, &known.age, known.is_halved);
        kind = kind_now(self, count, known.age);
        if (note_use(self, tag, count, known.age) < 0) return -1;
    }
    one->kind = (uint8_t)kind;
    one->last = (uint32_t)self->now;
    one->flags = (uint8_t)(HELD | count);
    return 0;
}

static PyObject *inserted(Panel *self, PyObject *const *given, Py_ssize_t given_count) {
    if (!require(given_count, 3)) return NULL;
    Py_ssize_t count;
    int by_request = PyObject_IsTrue(given[2]);
    if (by_request < 0) return NULL;
    int32_t *handles = handles_of(given[0], &count);
    PyObject *keys = handles ? PySequence_Fast(given[1], "expected keys") : NULL;
    int failed = !keys;
    if (keys && PySequence_Fast_GET_SIZE(keys) != count) {
        PyErr_SetString(PyExc_ValueError, "not as many keys as handles");
        failed = 1;
    }
    for (Py_ssize_t at = 0; !failed && at < count; at++)
        failed = insert_one(self, handles[at], tag_of_key(PySequence_Fast_GET_ITEM(keys, at)),
                            by_request) < 0;
    PyMem_RawFree(handles);
    Py_XDECREF(keys);
    if (failed) return NULL;
    Py_RETURN_NONE;
}

static int drop_one(Panel *self, int64_t handle, int evicted) {
    Block *one = block_of(self, handle, 0);
    if (!one) return -1;
    uint64_t tag = tag_of(one);
    if (evicted) {
        take_ghost(self, tag);
        int64_t last = self->now - (uint32_t)((uint32_t)self->now - one->last);
        put_ghost(self, tag, last, count_of(self, tag, one), one->kind, 0);
    } else if (samples(self, (uint32_t)tag)) {
        leave_shadows(self, tag);
    }
    one->flags = 0;
    return 0;
}

static PyObject *dropped(Panel *self, PyObject *const *given, Py_ssize_t given_count) {
    if (!require(given_count, 2)) return NULL;
    Py_ssize_t count;
    int evicted = PyObject_IsTrue(given[1]), failed = 0;
    if (evicted < 0) return NULL;
    int32_t *handles = handles_of(given[0], &count);
    if (!handles) return NULL;
    for (Py_ssize_t at = 0; !failed && at < count; at++)
        failed = drop_one(self, handles[at], evicted) < 0;
    PyMem_RawFree(handles);
    if (failed) return NULL;
    Py_RETURN_NONE;
}

static PyObject *refused(Panel *self, PyObject *given) {
    PyObject *keys = PySequence_Fast(given, "expected keys");
    if (!keys) return NULL;
    for (Py_ssize_t at = 0; at < PySequence_Fast_GET_SIZE(keys); at++) {
        uint64_t tag = tag_of_key(PySequence_Fast_GET_ITEM(keys, at));
        if (tag == ~(uint64_t)0) break;
        if (samples(self, (uint32_t)tag)) leave_shadows(self, tag);
    }
    Py_DECREF(keys);
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_NONE;
}

static int push_one(Panel *self, int64_t handle, int priority, int front) {
    Block *one = block_of(self, handle, 0);
    if (!one) return -1;
    one->priority = (uint8_t)priority;
    one->flags &= ~ASKED;
    one->last = (uint32_t)self->now;
    link_block(self, one, front);
    return 0;
}

static int touch_one(Panel *self, int64_t handle) {
    Block *one = block_of(self, handle, 1);
    if (!one) return -1;
    if (!(one->flags & ASKED)) return use_block(self, one);
    unlink_block(self, one);
    one->flags &= ~ASKED;
    one->last = (uint32_t)self->now;
    link_block(self, one, 0);
    return 0;
}

static int remove_one(Panel *self, int64_t handle) {
    Block *one = block_of(self, handle, 1);
    if (one) unlink_block(self, one);
    return one ? 0 : -1;
}

static int priority_of(PyObject *given) {
    long priority = PyLong_AsLong(given);
    if (priority >= 0 && priority < PRIORITIES) return (int)priority;
    if (!PyErr_Occurred()) PyErr_Format(PyExc_AssertionError, "priority %ld", priority);
    return -1;
}

static PyObject *push(Panel *self, PyObject *const *given, Py_ssize_t count) {
    if (!require(count, 3)) return NULL;
    Py_ssize_t handle = PyNumber_AsSsize_t(given[0], PyExc_IndexError);
    int priority = priority_of(given[1]), front = PyObject_IsTrue(given[2]);
    if (PyErr_Occurred() || push_one(self, handle, priority, front) < 0) return NULL;
    Py_RETURN_NONE;
}

static PyObject *one_by_one(Panel *self, PyObject *given, int (*call)(Panel *, int64_t)) {
    Py_ssize_t handle = PyNumber_AsSsize_t(given, PyExc_IndexError);
    if (PyErr_Occurred() || call(self, handle) < 0) return NULL;
    Py_RETURN_NONE;
}

static PyObject *touch(Panel *self, PyObject *given) { return one_by_one(self, given, touch_one); }
static PyObject *removed(Panel *self, PyObject *given) {
    return one_by_one(self, given, remove_one);
}

static PyObject *push_all(Panel *self, PyObject *const *given, Py_ssize_t given_count) {
    if (!require(given_count, 2)) return NULL;
    int priority = priority_of(given[1]), failed = 0;
    Py_ssize_t count = 0;
    int32_t *handles = priority < 0 ? NULL : handles_of(given[0], &count);
    if (!handles) return NULL;
    for (Py_ssize_t at = 0; !failed && at < count; at++)
        failed = push_one(self, handles[at], priority, 0) < 0;
    PyMem_RawFree(handles);
    if (failed) return NULL;
    Py_RETURN_NONE;
}

static PyObject *all_of(Panel *self, PyObject *given, int (*call)(Panel *, int64_t)) {
    Py_ssize_t count;
    int failed = 0;
    int32_t *handles = handles_of(given, &count);
    if (!handles) return NULL;
    for (Py_ssize_t at = 0; !failed && at < count; at++) failed = call(self, handles[at]) < 0;
    PyMem_RawFree(handles);
    if (failed) return NULL;
    Py_RETURN_NONE;
}

static PyObject *touch_all(Panel *self, PyObject *given) { return all_of(self, given, touch_one); }
static PyObject *remove_all(Panel *self, PyObject *given) {
    return all_of(self, given, remove_one);
}

static PyObject *reserve(Panel *self, PyObject *given) {
    Py_ssize_t count = PyNumber_AsSsize_t(given, PyExc_IndexError);
    if (PyErr_Occurred() || reserve_blocks(self, count) < 0) return NULL;
    Py_RETURN_NONE;
}

enum { TABLE = CLASSES * BINS, PAIRS = RULES * RULES, STATE = 2 * TABLE + 2 * PAIRS + RULES + 2 };

static PyObject *state(Panel *self, PyObject *unused) {
    double values[STATE];
    memcpy(values, self->hits, sizeof self->hits);
    memcpy(values + TABLE, self->reached, sizeof self->reached);
    memcpy(values + 2 * TABLE, self->ahead, sizeof self->ahead);
    memcpy(values + 2 * TABLE + PAIRS, self->spread, sizeof self->spread);
    memcpy(values + 2 * TABLE + 2 * PAIRS, self->served, sizeof self->served);
    values[STATE - 2] = self->wanted;
    values[STATE - 1] = self->leader;
    return PyBytes_FromStringAndSize((const char *)values, sizeof values);
}

static PyObject *restore(Panel *self, PyObject *given) {
    double values[STATE];
    if (!PyBytes_Check(given) || PyBytes_GET_SIZE(given) != sizeof values) {
        PyErr_SetString(PyExc_ValueError, "not a state");
        return NULL;
    }
    memcpy(values, PyBytes_AS_STRING(given), sizeof values);
    memcpy(self->hits, values, sizeof self->hits);
    memcpy(self->reached, values + TABLE, sizeof self->reached);
    memcpy(self->ahead, values + 2 * TABLE, sizeof self->ahead);
    memcpy(self->spread, values + 2 * TABLE + PAIRS, sizeof self->spread);
    memcpy(self->served, values + 2 * TABLE + 2 * PAIRS, sizeof self->served);
    self->wanted = values[STATE - 2];
    double leader = values[STATE - 1];
    self->leader = leader >= 0 && leader < RULES ? (int)leader : HAZARD;
    settle(self);
    learn(self);
    Py_RETURN_NONE;
}

static PyObject *size_of(Panel *self, PyObject *unused) {
    int64_t bytes = (int64_t)sizeof(Panel) + self->room * (int64_t)sizeof(Block) +
                    self->buckets * WAYS * 2 + self->words * 16 +
                    self->sampled_room * (int64_t)sizeof(Sampled) + self->sampled_map_size * 4 +
                    (int64_t)(self->log_room * sizeof(Use));
    return PyLong_FromLongLong(bytes);
}

/* ---- the walk */

typedef struct {
    PyObject_HEAD
    Panel *panel;
    int priority;       /* the next one to begin */
    int32_t front;      /* the next one of the front, -1 at its end */
    int32_t at[2 * CLASSES]; /* the next of each list, and from its other end; -1 at the end */
    Rank ranks[2 * CLASSES];
    int slots, left; /* in use; lists that have not ended */
} Walk;

static void step_walk(Walk *walk, int slot, int32_t handle) {
    const Panel *panel = walk->panel;
    if (handle < 0 || handle >= panel->room) handle = -1;
    if (walk->at[slot] >= 0) walk->left--;
    walk->at[slot] = handle;
    if (handle < 0) return;
    const Block *one = &panel->blocks[handle];
    walk->left++;
    walk->ranks[slot] =
        rank_of(panel, panel->rule, one->kind, (uint32_t)panel->now - one->last);
}

static void begin_walk(Walk *walk, int priority) {
    const Panel *panel = walk->panel;
    walk->front = panel->head[priority][FRONT];
    walk->slots = takes_newest(panel->rule) ? 2 * CLASSES : CLASSES;
    for (int slot = 0; slot < walk->slots; slot++) {
        int kind = slot % CLASSES;
        int32_t head = panel->head[priority][kind], tail = panel->tail[priority][kind];
        step_walk(walk, slot, slot == kind ? head : tail == head ? -1 : tail);
    }
}

/* The next handle, -1 at the end. */
static int32_t step(Walk *walk) {
    Panel *panel = walk->panel;
    while (walk->front < 0 && !walk->left) {
        while (walk->priority < PRIORITIES && !panel->used[walk->priority]) walk->priority++;
        if (walk->priority == PRIORITIES) return -1;
        begin_walk(walk, walk->priority++);
    }
    if (walk->front >= 0 && walk->front < panel->room) {
        int32_t handle = walk->front;
        walk->front = panel->blocks[handle].next;
        return handle;
    }
    int best = -1;
    for (int slot = 0; slot < walk->slots; slot++)
        if (walk->at[slot] >= 0 && (best < 0 || before(walk->ranks[slot], walk->ranks[best])))
            best = slot;
    if (best < 0) return -1;
    int32_t handle = walk->at[best];
    const Block *one = &panel->blocks[handle];
    int32_t next = best < CLASSES ? one->next : one->prev;
    if (walk->slots > CLASSES) { /* until both ends of the list meet */
        int32_t other = walk->at[best < CLASSES ? best + CLASSES : best - CLASSES];
        if (other < 0 || other == next) next = -1;
    }
    step_walk(walk, best, next);
    return handle;
}

static PyObject *walk_next(Walk *walk) {
    int32_t handle = step(walk);
    return handle < 0 ? NULL : PyLong_FromLong(handle);
}

static void walk_free(Walk *walk) {
    PyTypeObject *type = Py_TYPE(walk);
    Py_XDECREF(walk->panel);
    type->tp_free((PyObject *)walk);
    Py_DECREF(type);
}

static PyTypeObject *walk_type;

static PyObject *walk_new(Panel *self) {
    Walk *walk = (Walk *)walk_type->tp_alloc(walk_type, 0);
    if (!walk) return NULL;
    Py_INCREF(self);
    walk->panel = self;
    walk->front = -1;
    memset(walk->at, 0xFF, sizeof walk->at);
    return (PyObject *)walk;
}

static PyType_Slot walk_slots[] = {
    {Py_tp_iter, PyObject_SelfIter}, {Py_tp_iternext, walk_next}, {Py_tp_dealloc, walk_free},
    {0, NULL},
};
static PyType_Spec walk_spec = {"kvladder.policy._panel.Walk", sizeof(Walk), 0,
                                Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                                walk_slots};

/* ---- the type */

static Py_ssize_t length(Panel *self) { return self->listed; }

static int contains(Panel *self, PyObject *given) {
    Py_ssize_t handle = PyNumber_AsSsize_t(given, PyExc_IndexError);
    if (PyErr_Occurred()) return -1;
    return handle >= 0 && handle < self->room && self->blocks[handle].flags & LISTED ? 1 : 0;
}

static PyObject *get_rule(Panel *self, void *unused) { return PyLong_FromLong(self->rule); }

static void panel_free(Panel *self) {
    PyTypeObject *type = Py_TYPE(self);
    void *parts[] = {self->sampled, self->sampled_map, self->log, self->ghosts,
                     self->blocks,  self->seen,        self->seen_before};
    for (size_t at = 0; at < sizeof parts / sizeof *parts; at++) PyMem_RawFree(parts[at]);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

static PyObject *panel_new(PyTypeObject *type, PyObject *given, PyObject *named) {
    Py_ssize_t size;
    if (named && PyDict_GET_SIZE(named)) {
        PyErr_SetString(PyExc_TypeError, "Panel takes no named arguments");
        return NULL;
    }
    if (!PyArg_ParseTuple(given, "n", &size)) return NULL;
    if (size >= INT32_MAX / 4) {
        PyErr_Format(PyExc_ValueError, "a size of %zd blocks", size);
        return NULL;
    }
    Panel *self = (Panel *)type->tp_alloc(type, 0);
    if (!self) return NULL;
    self->size = size > 1 ? size : 1;
    double edge = (double)self->size / 16;
    for (int age = 1; age < BINS; age++, edge *= 1.4142135623730951) self->edges[age] = edge;
    self->rate = self->size / SAMPLE > 1 ? self->size / SAMPLE : 1;
    self->shadow_size = self->size / self->rate;
    self->forget = FORGET * (self->size > SAMPLE ? self->size : SAMPLE);
    self->learn_at = self->size / 2 + 1;
    self->halve_at = 256 * self->size;
    self->choose_at = self->size / 2;
    self->fade_at = 64 * self->size;
    self->sampled_free = -1;
    memset(self->shadow_head, 0xFF, sizeof self->shadow_head);
    memset(self->shadow_tail, 0xFF, sizeof self->shadow_tail);
    memset(self->head, 0xFF, sizeof self->head);
    memset(self->tail, 0xFF, sizeof self->tail);
    self->memory = self->size * TIMES_MAX < GHOSTS_MIN ? self->size * TIMES_MAX : GHOSTS_MIN;
    if (self->memory < self->size) self->memory = self->size;
    self->buckets = GHOSTS * self->memory / WAYS;
    self->words = self->memory * 3 / 8;
    self->seen = PyMem_RawCalloc((size_t)self->words, sizeof *self->seen);
    self->seen_before = PyMem_RawCalloc((size_t)self->words, sizeof *self->seen_before);
    self->ghosts = PyMem_RawCalloc((size_t)(self->buckets * WAYS), sizeof *self->ghosts);
    if (!self->ghosts || !self->seen || !self->seen_before || grow_sampled(self) < 0) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    return (PyObject *)self;
}

#define FAST(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL}
#define ONE(name) {#name, (PyCFunction)(void (*)(void))name, METH_O, NULL}
static PyMethodDef methods[] = {
    FAST(requested), FAST(inserted), FAST(dropped), ONE(refused), FAST(push), FAST(push_all),
    ONE(touch), ONE(touch_all), ONE(remove_all), ONE(reserve), ONE(restore),
    {"remove", (PyCFunction)(void (*)(void))removed, METH_O, NULL},
    {"state", (PyCFunction)(void (*)(void))state, METH_NOARGS, NULL},
    {"__sizeof__", (PyCFunction)(void (*)(void))size_of, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static PyGetSetDef getters[] = {{"rule", (getter)get_rule, NULL, NULL, NULL},
                                {NULL, NULL, NULL, NULL, NULL}};
static PyType_Slot panel_slots[] = {
    {Py_tp_new, panel_new},       {Py_tp_dealloc, panel_free}, {Py_tp_methods, methods},
    {Py_tp_getset, getters},      {Py_tp_iter, walk_new},      {Py_sq_length, length},
    {Py_sq_contains, contains},   {0, NULL},
};
static PyType_Spec panel_spec = {"kvladder.policy._panel.Panel", sizeof(Panel), 0,
                                 Py_TPFLAGS_DEFAULT, panel_slots};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_panel", NULL, -1, NULL,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__panel(void) {
    PyObject *made = PyModule_Create(&module), *type = PyType_FromSpec(&panel_spec);
    walk_type = (PyTypeObject *)PyType_FromSpec(&walk_spec);
    if (!made || !type || !walk_type || PyModule_AddObjectRef(made, "Panel", type) < 0) {
        Py_XDECREF(made);
        made = NULL;
    }
    Py_XDECREF(type);
    return made;
}
