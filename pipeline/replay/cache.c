/* The cache and the link of a replay: `SimulatedCache` of cache.py, which specifies it, call by call with the same
 * results. Keys are layer * experts + expert. Counters stay Python objects, and sums of seconds are added in the same
 * order, so that they are the same to the last bit. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <structmember.h>

#define VERSION 4
#define WORD 64 /* keys of a word of a set */

typedef struct {
    int key, lo, count, started, cancelled;
    int held; /* by a queue, the background orders, the link */
    double ordered_at;
    PyObject *predicted; /* the counters of a prediction's landings, or NULL */
} Order;

typedef struct {
    Order **items;
    Py_ssize_t first, end, room;
} Queue;

typedef struct {
    PyObject *counters; /* of the phase that predicted it; NULL where there is none */
    long long number;
    int lo, hi; /* tiles that were fetched for it and not used */
    int ordered;
} Prediction;

typedef struct {
    PyObject_HEAD
    int layers, experts, tiles, orders;
    long long capacity, kept, number;
    double tile_seconds, fetch_seconds, free;
    PyObject *counters, *error;
    Py_buffer buffers[3];
    int32_t *resident, *target, *ordered;
    Order **background; /* by key */
    int under_way;      /* of them */
    Queue queues[2];    /* predicted, placed */
    Order *flying;
    Prediction *predictions; /* by key */
    long predicted;          /* of them */
    uint64_t *below;         /* keys with residency below target */
    Py_ssize_t below_count, words;
} Cache;

/* Attributes of the counters. */
enum { DEMANDED, PREDICTED, USEFUL, LATE, WASTED, PLACED, WANTED, ISSUED, LINK_BUSY, NAMES };
static const char *const WORDS[NAMES] = {"demanded", "predicted",      "useful",         "late",     "wasted",
                                         "placed",   "wanted_experts", "issued_experts", "link_busy"};
static PyObject *names[NAMES];

static int add(PyObject *counters, int name, long count) {
    if (!count) return 0;
    PyObject *before = PyObject_GetAttr(counters, names[name]);
    if (!before) return -1;
    long value = PyLong_AsLong(before);
    Py_DECREF(before);
    if (value == -1 && PyErr_Occurred()) return -1;
    PyObject *after = PyLong_FromLong(value + count);
    if (!after) return -1;
    int failed = PyObject_SetAttr(counters, names[name], after);
    Py_DECREF(after);
    return failed;
}

static int link_busy(PyObject *counters, double *seconds) {
    PyObject *found = PyObject_GetAttr(counters, names[LINK_BUSY]);
    if (!found) return -1;
    *seconds = PyFloat_AsDouble(found);
    Py_DECREF(found);
    return *seconds == -1.0 && PyErr_Occurred() ? -1 : 0;
}

static int set_link_busy(PyObject *counters, double seconds) {
    PyObject *value = PyFloat_FromDouble(seconds);
    if (!value) return -1;
    int failed = PyObject_SetAttr(counters, names[LINK_BUSY], value);
    Py_DECREF(value);
    return failed;
}

static void release(Order *order) {
    if (!--order->held) {
        Py_XDECREF(order->predicted);
        PyMem_Free(order);
    }
}

static int push(Queue *queue, Order *order) {
    if (queue->end == queue->room) {
        Py_ssize_t size = queue->end - queue->first;
        if (queue->first < queue->room / 2 || !queue->room) {
            Py_ssize_t room = queue->room ? 2 * queue->room : 64;
            Order **items = PyMem_Realloc(queue->items, room * sizeof(*items));
            if (!items) return PyErr_NoMemory(), -1;
            queue->items = items, queue->room = room;
        }
        memmove(queue->items, queue->items + queue->first, size * sizeof(*queue->items));
        queue->first = 0, queue->end = size;
    }
    queue->items[queue->end++] = order;
    order->held++;
    return 0;
}

static void set_below(Cache *c, int key) {
    uint64_t bit = 1ull << key % WORD, *word = c->below + key / WORD;
    if (!(*word & bit)) *word |= bit, c->below_count++;
}

static void clear_below(Cache *c, int key) {
    uint64_t bit = 1ull << key % WORD, *word = c->below + key / WORD;
    if (*word & bit) *word &= ~bit, c->below_count--;
}

static void end_background(Cache *c, int key) {
    Order *order = c->background[key];
    c->background[key] = NULL, c->under_way--;
    release(order);
}

static void end_prediction(Cache *c, int key) {
    PyObject *counters = c->predictions[key].counters;
    c->predictions[key].counters = NULL, c->predicted--;
    Py_DECREF(counters);
}

static void end_prediction_if_done(Cache *c, int key) {
    if (c->predictions[key].lo == c->predictions[key].hi && c->resident[key] == c->target[key])
        end_prediction(c, key);
}

static void add_tiles(Cache *c, int key, int count) {
    int resident = c->resident[key] += count;
    if (c->ordered[key] < resident) c->ordered[key] = resident;
    if (resident == c->target[key]) clear_below(c, key);
}

static void cancel(Cache *c, Order *order) {
    order->count = order->started, order->cancelled = 1;
    c->ordered[order->key] = c->resident[order->key];
    if (c->flying != order) end_background(c, order->key);
}

static Order *next_order(Cache *c) {
    for (Queue *queue = c->queues; queue < c->queues + 2; queue++)
        while (queue->first < queue->end) {
            Order *order = queue->items[queue->first];
            if (order->started < order->count) return order;
            queue->first++;
            release(order);
        }
    return NULL;
}

/* The next `count` tiles of an order have landed. */
static int book(Cache *c, Order *order, int count, int kept) {
    int key = order->key;
    Prediction *prediction = order->predicted && c->predictions[key].counters ? c->predictions + key : NULL;
    if (kept) add_tiles(c, key, count);
    PyObject *booked = prediction ? prediction->counters : kept ? NULL : order->predicted;
    if (!booked) return add(c->counters, PLACED, count);
    if (kept && prediction) {
        if (prediction->lo == prediction->hi) prediction->lo = c->resident[key] - count;
        prediction->hi = c->resident[key];
    }
    return add(booked, PREDICTED, count) || add(booked, WASTED, kept ? 0 : count) ? -1 : 0;
}

/* The tile on the link has landed. */
static int land(Cache *c) {
    Order *order = c->flying;
    int key = order->key, tile = order->lo + order->started - 1, ended = order->started >= order->count;
    c->flying = NULL;
    int failed = book(c, order, 1, tile == c->resident[key] && tile < c->target[key]);
    if (ended) end_background(c, key);
    release(order);
    return failed;
}

static int advance(Cache *c, double now) {
    if (!c->under_way || (c->flying && c->free > now)) return 0;
    double busy;
    if (link_busy(c->counters, &busy)) return -1;
    double began = busy;
    for (;;) {
        if (c->flying) {
            if (c->free > now) break;
            if (land(c)) return -1;
        }
        Order *order = next_order(c);
        if (!order) break;
        double start = c->free > order->ordered_at ? c->free : order->ordered_at;
        if (start >= now) break;
        double seconds = order->started ? c->tile_seconds : c->fetch_seconds + c->tile_seconds;
        order->started++;
        double free = start + seconds;
        busy += seconds;
        int landed = 0;
        while (order->started < order->count && free < now) { /* the next one follows at once */
            landed++, order->started++;
            free += c->tile_seconds, busy += c->tile_seconds;
        }
        c->flying = order, order->held++, c->free = free;
        if (landed && book(c, order, landed, 1)) return -1; /* its tiles are the next up to the target */
    }
    return busy == began ? 0 : set_link_busy(c->counters, busy);
}

static int order_missing(Cache *c, int key, int predicted, double now) {
    int lo = c->resident[key], count = c->target[key] - lo;
    Order *order = PyMem_Calloc(1, sizeof(*order));
    if (!order) return PyErr_NoMemory(), -1;
    order->held = 1; /* by the background orders */
    *order = (Order){key, lo, count, 0, 0, 1, now, NULL};
    if (predicted) {
        Prediction *prediction = c->predictions + key;
        order->predicted = Py_NewRef(prediction->counters);
        if (!prediction->ordered && add(prediction->counters, ISSUED, 1)) return release(order), -1;
        prediction->ordered = 1;
    }
    if (push(c->queues + !predicted, order)) return release(order), -1;
    c->background[key] = order, c->under_way++;
    c->ordered[key] = lo + count;
    return 0;
}

static int by_number(const void *a, const void *b) {
    long long first = *(const long long *)a, second = *(const long long *)b;
    return first < second ? -1 : first > second;
}

static int update(Cache *c, double now) {
    if (advance(c, now)) return -1;
    int room = c->orders - c->under_way;
    if (room <= 0 || !c->below_count) return 0;
    if (c->predicted) {
        long long(*found)[2] = PyMem_Malloc(c->predicted * sizeof(*found)); /* number, key */
        if (!found) return PyErr_NoMemory(), -1;
        long count = 0;
        for (Py_ssize_t word = 0; word < c->words; word++)
            for (uint64_t bits = c->below[word]; bits; bits &= bits - 1) {
                int key = (int)(word * WORD) + __builtin_ctzll(bits);
                if (!c->predictions[key].counters || c->background[key]) continue;
                found[count][0] = c->predictions[key].number, found[count++][1] = key;
            }
        qsort(found, count, sizeof(*found), by_number);
        int failed = 0;
        for (long i = 0; i < count && room && !failed; i++, room--)
            failed = order_missing(c, (int)found[i][1], 1, now);
        PyMem_Free(found);
        if (failed) return -1;
    }
    for (Py_ssize_t word = 0; room && word < c->words; word++)
        for (uint64_t bits = c->below[word]; bits && room; bits &= bits - 1) {
            int key = (int)(word * WORD) + __builtin_ctzll(bits);
            if (c->background[key]) continue;
            if (order_missing(c, key, 0, now)) return -1;
            room--;
        }
    return 0;
}

/* One change of a target, a tuple (layer, expert, tiles). */
static int retarget(Cache *c, PyObject *change, int predicted) {
    PyObject *parts = PySequence_Fast(change, "a target is three numbers");
    if (!parts) return -1;
    long numbers[3] = {-1, -1, -1};
    for (int i = 0; i < 3 && PySequence_Fast_GET_SIZE(parts) == 3; i++)
        numbers[i] = PyLong_AsLong(PySequence_Fast_GET_ITEM(parts, i));
    Py_DECREF(parts);
    if (PyErr_Occurred()) return -1;
    long layer = numbers[0], expert = numbers[1], tiles = numbers[2];
    if (layer < 0 || layer >= c->layers || expert < 0 || expert >= c->experts || tiles < 0 || tiles > c->tiles) {
        PyErr_Format(c->error, "the policy set a target that does not exist: %S", change);
        return -1;
    }
    int key = (int)(layer * c->experts + expert), before = c->target[key], has = c->resident[key];
    c->kept += tiles - before;
    c->target[key] = (int32_t)tiles;
    if (has < tiles)
        set_below(c, key);
    else {
        clear_below(c, key);
        if (has > tiles) c->resident[key] = c->ordered[key] = (int32_t)tiles;
    }
    Order *order = c->background[key];
    if (order && order->lo + order->count > tiles) cancel(c, order);
    Prediction *prediction = c->predictions + key;
    if (predicted && tiles > before) {
        if (!prediction->counters) {
            *prediction = (Prediction){Py_NewRef(c->counters), c->number++, 0, 0, 0};
            c->predicted++;
            return add(c->counters, WANTED, 1);
        }
    } else if (prediction->counters) {
        int least = prediction->lo > tiles ? prediction->lo : (int)tiles;
        int wasted = prediction->hi > least ? prediction->hi - least : 0;
        prediction->hi -= wasted;
        int failed = add(prediction->counters, WASTED, wasted);
        end_prediction_if_done(c, key);
        return failed;
    }
    return 0;
}

static PyObject *cache_retarget(Cache *c, PyObject *const *args, Py_ssize_t count, PyObject *words) {
    int predicted = count + (words ? PyTuple_GET_SIZE(words) : 0) == 2 ? PyObject_IsTrue(args[1]) : 0;
    if (predicted < 0) return NULL;
    PyObject *changes = PySequence_Fast(args[0], "targets are iterated");
    if (!changes) return NULL;
    int failed = 0;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(changes) && !failed; i++)
        failed = retarget(c, PySequence_Fast_GET_ITEM(changes, i), predicted);
    Py_DECREF(changes);
    if (failed) return NULL;
    if (c->kept > c->capacity)
        return PyErr_Format(c->error, "the policy's targets need %lld tiles, the cache holds %lld", c->kept, c->capacity);
    Py_RETURN_NONE;
}

static PyObject *cache_settle(Cache *c, PyObject *nothing) {
    (void)nothing;
    memset(c->below, 0, c->words * sizeof(*c->below));
    c->below_count = 0;
    Py_RETURN_NONE;
}

static PyObject *cache_advance(Cache *c, PyObject *now) {
    double seconds = PyFloat_AsDouble(now);
    if (seconds == -1.0 && PyErr_Occurred()) return NULL;
    if (advance(c, seconds)) return NULL;
    Py_RETURN_NONE;
}

static PyObject *cache_update(Cache *c, PyObject *now) {
    double seconds = PyFloat_AsDouble(now);
    if (seconds == -1.0 && PyErr_Occurred()) return NULL;
    if (update(c, seconds)) return NULL;
    Py_RETURN_NONE;
}

/* The device computes with the first tiles of an expert that has a prediction. */
static int use(Cache *c, int key, long tiles) {
    Prediction *prediction = c->predictions + key;
    long used = (prediction->hi < tiles ? prediction->hi : tiles) - prediction->lo;
    if (used > 0) {
        prediction->lo += (int)used;
        if (add(prediction->counters, USEFUL, used)) return -1;
    }
    end_prediction_if_done(c, key);
    return 0;
}

static PyObject *cache_used(Cache *c, PyObject *const *args, Py_ssize_t count) {
    int layer, expert;
    if (count != 2 || !PyArg_ParseTuple(args[0], "ii", &layer, &expert)) return NULL;
    long tiles = PyLong_AsLong(args[1]);
    if (tiles == -1 && PyErr_Occurred()) return NULL;
    int key = layer * c->experts + expert;
    if (c->predictions[key].counters && use(c, key, tiles)) return NULL;
    Py_RETURN_NONE;
}

typedef struct {
    int expert, lo, hi;
    double device; /* seconds of a tile, where the device computes it */
} Item;

typedef struct {
    int item;
    double at; /* seconds */
} Tile;

/* Adds the landings of `count` demanded tiles of an item. `moving`: when the first of them lands if it moves, else
 * negative. `at`: when the link is free, `busy`: the seconds that it moves. */
static Tile *demanded(Cache *c, int layer, Item *items, int item, int count, double beside, double moving, double *at,
                      double *busy, Tile *tiles) {
    int key = layer * c->experts + items[item].expert, kept = c->target[key] - c->resident[key];
    if (kept > count) kept = count;
    if (kept > 0) add_tiles(c, key, kept);
    for (int i = 0; i < count; i++) {
        double landing = moving;
        if (moving < 0) {
            double seconds = beside + c->tile_seconds;
            *at += seconds, *busy += seconds;
            landing = *at;
        }
        *tiles++ = (Tile){item, landing};
        beside = 0.0, moving = -1.0;
    }
    return tiles;
}

/* Fetches the items before all else. Their tiles [count] in the order in which they land, to be freed; NULL with an
 * exception. */
static Tile *demand(Cache *c, int layer, Item *items, int size, double now, Py_ssize_t *count) {
    int known = 0;
    long late = 0, sum = 0;
    Py_ssize_t most = 1;
    for (int i = 0; i < size; i++) {
        Item *item = items + i;
        int key = layer * c->experts + item->expert;
        most += 2 * (Py_ssize_t)item->hi;
        if (c->predictions[key].counters) {
            end_prediction(c, key);
            int predicted = item->hi < c->target[key] ? item->hi : c->target[key];
            if (predicted > item->lo) late += predicted - item->lo;
        }
        known |= c->background[key] != NULL;
    }
    if (add(c->counters, LATE, late)) return NULL;
    Tile *tiles = PyMem_Malloc(most * sizeof(*tiles)), *end = tiles;
    if (!tiles) return PyErr_NoMemory(), NULL;
    double at = c->free > now ? c->free : now, busy = 0.0;
    for (int q = 0; q < 2 && known; q++)
        for (Py_ssize_t i = c->queues[q].first; i < c->queues[q].end; i++) {
            Order *order = c->queues[q].items[i];
            int key = order->key, found = 0;
            if (key / c->experts != layer || c->background[key] != order || order->cancelled) continue;
            while (found < size && items[found].expert != key % c->experts) found++;
            if (found == size) continue;
            Item *item = items + found;
            int reached = order->lo + order->count < item->hi ? order->lo + order->count : item->hi;
            double beside = order->started ? 0.0 : c->fetch_seconds, moving = c->flying == order ? c->free : -1.0;
            cancel(c, order);
            if (moving >= 0) {
                c->flying = NULL;
                end_background(c, key);
                release(order);
            }
            sum += reached - item->lo;
            end = demanded(c, layer, items, found, reached - item->lo, beside, moving, &at, &busy, end);
            item->lo = reached;
        }
    if (c->flying && land(c)) goto failed; /* before the first order that has not begun */
    for (int i = 0; i < size; i++)
        if (items[i].hi > items[i].lo) {
            int missing = items[i].hi - items[i].lo;
            sum += missing;
            end = demanded(c, layer, items, i, missing, c->fetch_seconds, -1.0, &at, &busy, end);
        }
    double before;
    if (add(c->counters, DEMANDED, sum) || link_busy(c->counters, &before) || set_link_busy(c->counters, before + busy))
        goto failed;
    if (end > tiles && at > c->free) c->free = at;
    *count = end - tiles;
    return tiles;
failed:
    PyMem_Free(tiles);
    return NULL;
}

static PyObject *cache_demand(Cache *c, PyObject *const *args, Py_ssize_t count) {
    if (count != 3) return PyErr_SetString(PyExc_TypeError, "demand(layer, missing, now)"), NULL;
    int layer = (int)PyLong_AsLong(args[0]);
    double now = PyFloat_AsDouble(args[2]);
    if (PyErr_Occurred() || advance(c, now)) return NULL;
    PyObject *missing = PySequence_Fast(args[1], "missing tiles are a list"), *landings = NULL;
    if (!missing) return NULL;
    int size = (int)PySequence_Fast_GET_SIZE(missing);
    Item *items = PyMem_Malloc((size + 1) * sizeof(*items));
    Tile *tiles = NULL;
    Py_ssize_t landed = 0;
    if (!items) PyErr_NoMemory();
    for (int i = 0; items && i < size; i++)
        if (!PyArg_ParseTuple(PySequence_Fast_GET_ITEM(missing, i), "iii", &items[i].expert, &items[i].lo, &items[i].hi))
            goto done;
    if (!items || !(tiles = demand(c, layer, items, size, now, &landed))) goto done;
    landings = PyList_New(landed);
    for (Py_ssize_t i = 0; landings && i < landed; i++) {
        PyObject *pair = Py_BuildValue("(id)", items[tiles[i].item].expert, tiles[i].at);
        if (!pair) {
            Py_CLEAR(landings);
            break;
        }
        PyList_SET_ITEM(landings, i, pair);
    }
done:
    PyMem_Free(tiles);
    PyMem_Free(items);
    Py_DECREF(missing);
    return landings;
}

/* compute(layer, experts, rows, cuts, seconds, launch, now, busy, waited), as SimulatedCache.compute */
static PyObject *cache_compute(Cache *c, PyObject *const *args, Py_ssize_t count) {
    if (count != 9) return PyErr_SetString(PyExc_TypeError, "compute takes nine arguments"), NULL;
    Py_ssize_t size = PyList_Check(args[1]) ? PyList_GET_SIZE(args[1]) : -1;
    for (int i = 1; i < 4; i++)
        if (!PyList_Check(args[i]) || PyList_GET_SIZE(args[i]) != size)
            return PyErr_SetString(PyExc_TypeError, "experts, rows, cuts: lists of one length"), NULL;
    int layer = (int)PyLong_AsLong(args[0]), missing = 0;
    double begun = PyFloat_AsDouble(args[5]), now = PyFloat_AsDouble(args[6]);
    double busy = PyFloat_AsDouble(args[7]), waited = PyFloat_AsDouble(args[8]);
    if (PyErr_Occurred()) return NULL;
    Item *items = PyMem_Malloc((size + 1) * sizeof(*items));
    if (!items) return PyErr_NoMemory();
    Tile *tiles = NULL;
    for (Py_ssize_t i = 0; i < size; i++) {
        int cut = (int)PyLong_AsLong(PyList_GET_ITEM(args[3], i));
        if (!cut) continue;
        int expert = (int)PyLong_AsLong(PyList_GET_ITEM(args[1], i)), key = layer * c->experts + expert;
        PyObject *known = PyDict_GetItemWithError(args[4], PyList_GET_ITEM(args[2], i));
        double seconds = known && PyTuple_Check(known) && PyTuple_GET_SIZE(known) > 1
                             ? PyFloat_AsDouble(PyTuple_GET_ITEM(known, 1))
                             : (PyErr_Occurred() ? 0 : (PyErr_SetString(PyExc_KeyError, "seconds of these rows"), 0));
        if (PyErr_Occurred() || key < 0 || key >= c->layers * c->experts) goto failed;
        int there = c->resident[key], here = cut < there ? cut : there;
        if (here) {
            begun += seconds * here;
            if (c->predictions[key].counters && use(c, key, here)) goto failed;
        }
        if (here < cut) items[missing++] = (Item){expert, here, cut, seconds};
    }
    double at = now + begun;
    busy += begun;
    if (missing) {
        Py_ssize_t landed;
        if (advance(c, now) || !(tiles = demand(c, layer, items, missing, now, &landed))) goto failed;
        for (Tile *tile = tiles; tile < tiles + landed; tile++) {
            if (tile->at > at) waited += tile->at - at, at = tile->at;
            at += items[tile->item].device, busy += items[tile->item].device;
        }
    }
    PyMem_Free(tiles);
    PyMem_Free(items);
    return Py_BuildValue("(ddd)", at, busy, waited);
failed:
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_IndexError, "no such expert");
    PyMem_Free(tiles);
    PyMem_Free(items);
    return NULL;
}

/* host_seconds(rows, cuts, seconds), as SimulatedCache.host_seconds */
static PyObject *cache_host_seconds(Cache *c, PyObject *const *args, Py_ssize_t count) {
    Py_ssize_t size = count == 3 && PyList_Check(args[0]) ? PyList_GET_SIZE(args[0]) : -1;
    if (size < 0 || !PyList_Check(args[1]) || PyList_GET_SIZE(args[1]) != size || !PyDict_Check(args[2]))
        return PyErr_SetString(PyExc_TypeError, "rows, cuts: lists of one length; seconds: a dict"), NULL;
    double found = 0.0;
    for (Py_ssize_t i = 0; i < size; i++) {
        long cut = PyLong_AsLong(PyList_GET_ITEM(args[1], i));
        if (cut >= c->tiles) continue;
        PyObject *known = PyDict_GetItemWithError(args[2], PyList_GET_ITEM(args[0], i));
        if (!known || !PyTuple_Check(known) || !PyTuple_GET_SIZE(known)) {
            if (!PyErr_Occurred()) PyErr_SetString(PyExc_KeyError, "seconds of these rows");
            return NULL;
        }
        found += PyFloat_AsDouble(PyTuple_GET_ITEM(known, 0)) * (double)(c->tiles - cut);
    }
    return PyErr_Occurred() ? NULL : PyFloat_FromDouble(found);
}

/* Seconds on the link of those tiles of an order that have not begun to move. */
static double seconds_left(Cache *c, Order *order) {
    int left = order->count - order->started;
    return left ? left * c->tile_seconds + (order->started ? 0.0 : c->fetch_seconds) : 0.0;
}

static PyObject *cache_link_seconds(Cache *c, PyObject *now) {
    double seconds = PyFloat_AsDouble(now), sum = 0.0;
    if (seconds == -1.0 && PyErr_Occurred()) return NULL;
    for (Queue *queue = c->queues; queue < c->queues + 2; queue++)
        for (Py_ssize_t i = queue->first; i < queue->end; i++) sum += seconds_left(c, queue->items[i]);
    double moving = c->free - seconds;
    return PyFloat_FromDouble((moving > 0 ? moving : 0.0) + sum);
}

/* A layer's (expert, tiles, seconds) under way, in the link's order. */
static PyObject *cache_under_way(Cache *c, PyObject *const *args, Py_ssize_t count) {
    if (count != 2) return PyErr_SetString(PyExc_TypeError, "under_way(layer, now)"), NULL;
    int layer = (int)PyLong_AsLong(args[0]);
    double now = PyFloat_AsDouble(args[1]);
    if (PyErr_Occurred()) return NULL;
    PyObject *found = PyList_New(0);
    if (!found || !c->under_way) return found;
    double moved = c->free > now ? c->free - now : 0.0, at = moved;
    for (Queue *queue = c->queues; queue < c->queues + 2; queue++)
        for (Py_ssize_t i = queue->first; i < queue->end; i++) {
            Order *order = queue->items[i];
            if (order->cancelled || c->background[order->key] != order) continue;
            double left = seconds_left(c, order);
            at += left;
            if (order->key / c->experts != layer) continue;
            PyObject *one = Py_BuildValue("(iid)", order->key % c->experts,
                                          order->lo + order->count - c->resident[order->key], left ? at : moved);
            int failed = !one || PyList_Append(found, one);
            Py_XDECREF(one);
            if (failed) return Py_DECREF(found), NULL;
        }
    return found;
}

static PyObject *cache_unused(Cache *c, void *closure) {
    (void)closure;
    long unused = 0;
    for (int key = 0; key < c->layers * c->experts; key++)
        if (c->predictions[key].counters) unused += c->predictions[key].hi - c->predictions[key].lo;
    return PyLong_FromLong(unused);
}

static int cache_init(Cache *c, PyObject *args, PyObject *words) {
    static char *keywords[] = {"residency", "target",        "ordered", "tiles", "orders", "capacity", "tile_seconds",
                               "fetch_seconds", "error", NULL};
    PyObject *arrays[3], *error;
    if (c->background) return PyErr_SetString(PyExc_TypeError, "made already"), -1;
    if (!PyArg_ParseTupleAndKeywords(args, words, "OOOiiLddO", keywords, arrays, arrays + 1, arrays + 2, &c->tiles,
                                     &c->orders, &c->capacity, &c->tile_seconds, &c->fetch_seconds, &error))
        return -1;
    for (int i = 0; i < 3; i++) {
        Py_buffer *buffer = c->buffers + i;
        if (PyObject_GetBuffer(arrays[i], buffer, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE | PyBUF_FORMAT)) return -1;
        if (buffer->ndim != 2 || buffer->itemsize != 4 || buffer->len != c->buffers->len)
            return PyErr_SetString(PyExc_ValueError, "the arrays are int32 [layers, experts]"), -1;
    }
    c->layers = (int)c->buffers->shape[0], c->experts = (int)c->buffers->shape[1];
    c->resident = c->buffers[0].buf, c->target = c->buffers[1].buf, c->ordered = c->buffers[2].buf;
    c->error = Py_NewRef(error);
    Py_ssize_t keys = (Py_ssize_t)c->layers * c->experts;
    c->words = (keys + WORD - 1) / WORD;
    c->background = PyMem_Calloc(keys + 1, sizeof(*c->background));
    c->predictions = PyMem_Calloc(keys + 1, sizeof(*c->predictions));
    c->below = PyMem_Calloc(c->words + 1, sizeof(*c->below));
    if (!c->background || !c->predictions || !c->below) return PyErr_NoMemory(), -1;
    return 0;
}

static void cache_dealloc(Cache *c) {
    PyTypeObject *type = Py_TYPE(c);
    for (int key = 0; c->background && c->predictions && key < c->layers * c->experts; key++) {
        if (c->background[key]) end_background(c, key);
        if (c->predictions[key].counters) end_prediction(c, key);
    }
    for (Queue *queue = c->queues; queue < c->queues + 2; queue++) {
        while (queue->first < queue->end) release(queue->items[queue->first++]);
        PyMem_Free(queue->items);
    }
    if (c->flying) release(c->flying);
    for (int i = 0; i < 3; i++) PyBuffer_Release(c->buffers + i);
    PyMem_Free(c->background);
    PyMem_Free(c->predictions);
    PyMem_Free(c->below);
    Py_XDECREF(c->counters);
    Py_XDECREF(c->error);
    type->tp_free((PyObject *)c);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"retarget", (PyCFunction)(void (*)(void))cache_retarget, METH_FASTCALL | METH_KEYWORDS, NULL},
    {"settle", (PyCFunction)cache_settle, METH_NOARGS, NULL},
    {"advance", (PyCFunction)cache_advance, METH_O, NULL},
    {"update", (PyCFunction)cache_update, METH_O, NULL},
    {"used", (PyCFunction)(void (*)(void))cache_used, METH_FASTCALL, NULL},
    {"demand", (PyCFunction)(void (*)(void))cache_demand, METH_FASTCALL, NULL},
    {"compute", (PyCFunction)(void (*)(void))cache_compute, METH_FASTCALL, NULL},
    {"host_seconds", (PyCFunction)(void (*)(void))cache_host_seconds, METH_FASTCALL, NULL},
    {"link_seconds", (PyCFunction)cache_link_seconds, METH_O, NULL},
    {"under_way", (PyCFunction)(void (*)(void))cache_under_way, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"counters", T_OBJECT_EX, offsetof(Cache, counters), 0, NULL},
    {"free", T_DOUBLE, offsetof(Cache, free), 0, NULL},
    {"predicted", T_LONG, offsetof(Cache, predicted), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef computed[] = {
    {"unused", (getter)cache_unused, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, PyType_GenericNew}, {Py_tp_init, cache_init},   {Py_tp_dealloc, cache_dealloc},
    {Py_tp_methods, methods},       {Py_tp_members, members},   {Py_tp_getset, computed},
    {0, NULL},
};

static PyType_Spec spec = {"pipeline.replay._cache.Cache", sizeof(Cache), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
                           slots};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_cache", NULL, -1, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__cache(void) {
    for (int i = 0; i < NAMES; i++)
        if (!(names[i] = PyUnicode_InternFromString(WORDS[i]))) return NULL;
    PyObject *made = PyModule_Create(&module), *type = PyType_FromSpec(&spec);
    if (!made || !type || PyModule_AddObjectRef(made, "Cache", type) ||
        PyModule_AddIntConstant(made, "VERSION", VERSION)) {
        Py_XDECREF(made);
        Py_XDECREF(type);
        return NULL;
    }
    Py_DECREF(type);
    return made;
}
