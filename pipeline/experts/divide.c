/* A layer's routing divided into one descriptor for each worker (division.py says how, shm/descriptor.py the bytes). */
#include <stdint.h>
#include <string.h>

enum { HEADER = 16 }; /* numbers of 4 bytes */
enum { FINE, BAD_EXPERT, NO_ROOM };

struct division {
    int64_t experts, nodes, workers;
    const int64_t *cores;
    int64_t row_cost; /* rows whose products take as long as one read of a tile's weights */
    int64_t rows, k;
    const int32_t *chosen; /* [rows, k] */
    const float *weights;  /* [rows, k]; 0 computes nothing */
    const int32_t *lo, *hi; /* [experts]: the tiles of each to be computed */
    int64_t seq, layer;     /* seq: of the first worker's descriptor, one more for each next worker */
    float threshold, share;
    int32_t *to; /* the descriptors, one after the other, in whole lines of 16 numbers */
    int64_t room;
    int64_t *starts, *lengths; /* written: [workers], numbers; length 0: nothing for this worker */
    int64_t *scratch;          /* [4 * experts + 2] */
    int32_t *pair_rows;        /* [rows * k] */
    float *pair_weights;
    int64_t tiles; /* written: of all items */
};

int tandem_divide_version(void) { return 2; }

struct writer {
    struct division *d;
    const int64_t *items, *ends; /* expert of each item; `ends` [items + 1]: its pairs */
    int64_t at;                  /* numbers of `to` that are used */
};

/* Begin a descriptor of so many items and rows. Returns its arrays; NULL without room. */
static int32_t *begin(struct writer *to, int64_t worker, int64_t items, int64_t rows) {
    struct division *d = to->d;
    int64_t length = HEADER + 4 * items + 1 + 2 * rows;
    if (to->at + length > d->room) return NULL;
    int32_t *at = d->to + to->at;
    int64_t head[6] = {0, d->seq + worker, d->layer, items, rows, d->rows};
    memset(at, 0, 4 * HEADER);
    memcpy(at, head, sizeof head);
    memcpy(at + 12, &d->threshold, 4), memcpy(at + 13, &d->share, 4);
    d->starts[worker] = to->at, d->lengths[worker] = length;
    to->at += (length + 15) / 16 * 16;
    return at + HEADER;
}

/* One worker's part: (item, lo, hi) of each. */
static int write_part(struct writer *to, int64_t worker, const int64_t (*part)[3], int64_t count) {
    struct division *d = to->d;
    int64_t rows = 0, at = 0;
    for (int64_t i = 0; i < count; i++) rows += to->ends[part[i][0] + 1] - to->ends[part[i][0]];
    if (!count) return FINE;
    int32_t *items = begin(to, worker, count, rows);
    if (!items) return NO_ROOM;
    int32_t *offsets = items + 3 * count, *which = offsets + count + 1, *weights = which + rows;
    for (int64_t i = 0; i < count; i++) {
        int64_t item = part[i][0], first = to->ends[item], number = to->ends[item + 1] - first;
        items[3 * i] = (int32_t)to->items[item], items[3 * i + 1] = (int32_t)part[i][1];
        items[3 * i + 2] = (int32_t)part[i][2], offsets[i] = (int32_t)at;
        memcpy(which + at, d->pair_rows + first, 4 * (size_t)number);
        memcpy(weights + at, d->pair_weights + first, 4 * (size_t)number);
        at += number;
        d->tiles += part[i][2] - part[i][1];
    }
    offsets[count] = (int32_t)at;
    return FINE;
}

/* Consecutive runs of equal cost: a tile belongs to the worker in whose run its middle lies. `part`: room for all items
 * (all tiles, with several nodes) of one worker. */
static int cut(struct writer *to, const int64_t *cost, int64_t items, int64_t (*part)[3]) {
    struct division *d = to->d;
    int64_t cores = 0, total = 0, worker = 0, count = 0, before = 0;
    for (int64_t w = 0; w < d->workers; w++) cores += d->cores[w];
    for (int64_t i = 0; i < items; i++) total += cost[i] * (d->hi[to->items[i]] - d->lo[to->items[i]]);
    int64_t end = d->cores[0];
    for (int64_t node = 0; node < d->nodes; node++) {
        for (int64_t i = 0; i < items; i++) {
            int64_t expert = to->items[i], first = d->lo[expert], last = d->hi[expert];
            int64_t step = d->nodes > 1 ? 1 : last - first;
            for (int64_t lo = first; lo < last; lo += step) {
                if (d->nodes > 1 && (expert + lo) % d->nodes != node) continue;
                int64_t hi = lo + step;
                for (int64_t start = lo;;) {
                    /* the first tile with its middle at or beyond this run's end */
                    int64_t beyond = 2 * end * total - cores * (2 * before + cost[i]), unit = 2 * cores * cost[i];
                    if (beyond > unit * (hi - lo - 1)) { /* none */
                        part[count][0] = i, part[count][1] = start, part[count++][2] = hi;
                        break;
                    }
                    int64_t stop = lo + (beyond > 0 ? (beyond + unit - 1) / unit : 0);
                    if (stop > start) {
                        part[count][0] = i, part[count][1] = start, part[count++][2] = stop;
                        start = stop;
                    }
                    int fault = write_part(to, worker, (const int64_t(*)[3])part, count);
                    if (fault) return fault;
                    count = 0, end += d->cores[++worker];
                }
                before += cost[i] * step;
            }
        }
    }
    return write_part(to, worker, (const int64_t(*)[3])part, count);
}

/* `part_room` [3 * (the most items of one worker)]. */
int tandem_divide(struct division *d, int64_t *part_room) {
    int64_t experts = d->experts, pairs = d->rows * d->k, items = 0;
    int64_t *place = d->scratch, *item = place + experts + 1, *ends = item + experts, *cost = ends + experts + 1;
    d->tiles = 0;
    memset(d->lengths, 0, (size_t)d->workers * sizeof *d->lengths);
    memset(place, 0, (size_t)(experts + 1) * sizeof *place);
    for (int64_t i = 0; i < pairs; i++) {
        if (d->chosen[i] < 0 || d->chosen[i] >= experts) return BAD_EXPERT;
        if (d->weights[i] != 0 && d->lo[d->chosen[i]] < d->hi[d->chosen[i]]) place[d->chosen[i]]++;
    }
    ends[0] = 0;
    for (int64_t e = 0; e < experts; e++) { /* `place` becomes where the next pair of an expert goes */
        int64_t count = place[e];
        place[e] = ends[items];
        if (!count) continue;
        item[items] = e, cost[items] = d->row_cost + count;
        ends[items + 1] = ends[items] + count, items++;
    }
    for (int64_t i = 0; i < pairs; i++) {
        int32_t e = d->chosen[i];
        if (d->weights[i] == 0 || d->lo[e] >= d->hi[e]) continue;
        d->pair_rows[place[e]] = (int32_t)(i / d->k), d->pair_weights[place[e]++] = d->weights[i];
    }
    if (!items) return FINE;
    struct writer to = {.d = d, .items = item, .ends = ends};
    return cut(&to, cost, items, (int64_t(*)[3])part_room);
}
