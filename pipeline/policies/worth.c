/* The loops of worth.py, which specifies them. Arrays are float32 [layers, experts] unless said otherwise. Ranks are
 * never negative, so that they compare like their bits. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <stdint.h>
#include <structmember.h>

#define VERSION 4

enum { VALUE, EMPTY, RANK, NOTED, AVERAGES, TARGET, ARRAYS };

typedef struct {
    PyObject_HEAD
    Py_buffer buffers[ARRAYS];
    float *value, *empty, *rank, *noted;
    float *averages; /* [layers, 2, experts], fresh and lasting */
    int32_t *target;
    int layers, experts;
    long free;       /* tiles */
    int32_t *lowest; /* by layer: the bits of its lowest rank; negative where a rank has changed since */
    PyTypeObject *made;
} Table;

static int layer_of(Table *t, PyObject *number) {
    long layer = PyLong_AsLong(number);
    if (layer >= 0 && layer < t->layers) return (int)layer;
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_IndexError, "no such layer");
    return -1;
}

static void ranked(Table *t, int layer) {
    const float *value = t->value + (size_t)layer * t->experts, *empty = t->empty + (size_t)layer * t->experts;
    float *rank = t->rank + (size_t)layer * t->experts;
    for (int i = 0; i < t->experts; i++) rank[i] = value[i] + empty[i];
    t->lowest[layer] = -1;
}

/* observe(layer, single, fresh kept, lasting kept, fresh, lasting, weight of the lasting one, the fresh one counts) */
static PyObject *table_observe(Table *t, PyObject *const *args, Py_ssize_t given) {
    if (given != 8) return PyErr_SetString(PyExc_TypeError, "observe takes eight arguments"), NULL;
    int layer = layer_of(t, args[0]), single = PyObject_IsTrue(args[1]), decode = PyObject_IsTrue(args[7]);
    float numbers[5];
    for (int i = 0; i < 5; i++) numbers[i] = (float)PyFloat_AsDouble(args[2 + i]);
    if (PyErr_Occurred()) return NULL;
    const float *kept = numbers, *weight = numbers + 2, lasting = numbers[4];
    int count = t->experts;
    float *share = t->noted + (size_t)layer * count, *value = t->value + (size_t)layer * count;
    float *fresh = t->averages + 2 * (size_t)layer * count, *slow = fresh + count;
    float factor = 1.0f, most = share[0];
    if (single) { /* softmax */
        float sum = 0.0f;
        for (int i = 1; i < count; i++) most = share[i] > most ? share[i] : most;
        for (int i = 0; i < count; i++) share[i] = expf(share[i] - most);
        for (int i = 0; i < count; i++) sum += share[i];
        factor = 1.0f / sum;
    }
    for (int i = 0; i < count; i++) {
        float use = share[i] * factor;
        fresh[i] = fresh[i] * kept[0] + weight[0] * use;
        slow[i] = slow[i] * kept[1] + weight[1] * use;
        value[i] = slow[i] * lasting + (decode ? fresh[i] : 0.0f);
    }
    ranked(t, layer);
    Py_RETURN_NONE;
}

/* All ranks anew. */
static PyObject *table_rank(Table *t, PyObject *nothing) {
    (void)nothing;
    for (int layer = 0; layer < t->layers; layer++) ranked(t, layer);
    Py_RETURN_NONE;
}

static int32_t lowest(Table *t, int layer) {
    if (t->lowest[layer] < 0) {
        const int32_t *bits = (const int32_t *)(t->rank + (size_t)layer * t->experts);
        int32_t least = INT32_MAX;
        for (int i = 0; i < t->experts; i++) least = bits[i] < least ? bits[i] : least;
        t->lowest[layer] = least;
    }
    return t->lowest[layer];
}

/* The expert of layers [begin, end) whose rank is lowest, where it is below `least`, which it replaces. */
static void lower(Table *t, int begin, int end, double *least, Py_ssize_t *found) {
    int at = -1;
    int32_t bits = INT32_MAX;
    for (int layer = begin; layer < end; layer++)
        if (lowest(t, layer) < bits) bits = t->lowest[layer], at = layer;
    if (at < 0) return;
    const float *rank = t->rank + (size_t)at * t->experts;
    int expert = 0;
    while (((const int32_t *)rank)[expert] != bits) expert++;
    if (rank[expert] < *least) *least = rank[expert], *found = (Py_ssize_t)at * t->experts + expert;
}

static void keep(Table *t, Py_ssize_t place, int tiles) {
    int32_t before = t->target[place];
    t->target[place] = tiles;
    if ((before == 0) == (tiles == 0)) return;
    t->empty[place] = tiles ? 0.0f : INFINITY;
    if (!tiles) t->rank[place] = INFINITY, t->lowest[place / t->experts] = -1;
}

static int append(Table *t, PyObject *targets, Py_ssize_t place) {
    PyObject *target = t->made->tp_alloc(t->made, 3);
    if (!target) return -1;
    PyTuple_SET_ITEM(target, 0, PyLong_FromSsize_t(place / t->experts));
    PyTuple_SET_ITEM(target, 1, PyLong_FromSsize_t(place % t->experts));
    PyTuple_SET_ITEM(target, 2, PyLong_FromLong(t->target[place]));
    int failed = PyErr_Occurred() ? -1 : PyList_Append(targets, target);
    Py_DECREF(target);
    return failed;
}

/* Up to `tiles` more tiles of an expert, as Worth.grow: appends the targets that change. */
static int grow(Table *t, int layer, long expert, long tiles, double most, int near, int within, PyObject *targets) {
    int half = t->layers / 2 < t->layers - 2 ? t->layers / 2 : t->layers - 2;
    int low = near - (half > 0 ? half : 0);
    long got = tiles < t->free ? tiles : t->free;
    t->free -= got;
    while (got < tiles) {
        double least = most;
        Py_ssize_t found = -1;
        lower(t, low > 0 ? low : 0, near + within, &least, &found);
        lower(t, t->layers + low, t->layers, &least, &found);
        if (found < 0) break;
        long held = t->target[found], lost = held < tiles - got ? held : tiles - got;
        keep(t, found, (int)(held - lost));
        got += lost;
        if (append(t, targets, found)) return -1;
    }
    if (!got) return 0;
    Py_ssize_t place = (Py_ssize_t)layer * t->experts + expert;
    keep(t, place, (int)(t->target[place] + got));
    return append(t, targets, place);
}

/* grow(layer, expert, tiles, least, near, within) */
static PyObject *table_grow(Table *t, PyObject *const *args, Py_ssize_t count) {
    if (count != 6) return PyErr_SetString(PyExc_TypeError, "grow takes six arguments"), NULL;
    int layer = layer_of(t, args[0]), near = layer < 0 ? -1 : layer_of(t, args[4]);
    long expert = PyLong_AsLong(args[1]), tiles = PyLong_AsLong(args[2]);
    double most = PyFloat_AsDouble(args[3]);
    int within = PyObject_IsTrue(args[5]);
    if (PyErr_Occurred()) return NULL;
    if (expert < 0 || expert >= t->experts) return PyErr_SetString(PyExc_IndexError, "no such expert"), NULL;
    PyObject *targets = PyList_New(0);
    if (targets && grow(t, layer, expert, tiles, most, near, within, targets)) Py_CLEAR(targets);
    return targets;
}

/* ahead(layer, experts, left, near, tiles) */
static PyObject *table_ahead(Table *t, PyObject *const *args, Py_ssize_t count) {
    if (count != 5 || !PyList_Check(args[1])) return PyErr_SetString(PyExc_TypeError, "ahead takes five arguments"), NULL;
    int layer = layer_of(t, args[0]), near = layer < 0 ? -1 : layer_of(t, args[3]);
    long left = PyLong_AsLong(args[2]), tiles = PyLong_AsLong(args[4]), no_room = 0;
    if (PyErr_Occurred()) return NULL;
    PyObject *targets = PyList_New(0);
    for (Py_ssize_t i = 0; targets && left && i < PyList_GET_SIZE(args[1]); i++) {
        long expert = PyLong_AsLong(PyList_GET_ITEM(args[1], i));
        if (expert < 0 || expert >= t->experts) {
            if (!PyErr_Occurred()) PyErr_SetString(PyExc_IndexError, "no such expert");
            Py_CLEAR(targets);
            break;
        }
        long missing = tiles - t->target[(size_t)layer * t->experts + expert], more = missing < left ? missing : left;
        if (!more) continue;
        Py_ssize_t before = PyList_GET_SIZE(targets);
        if (grow(t, layer, expert, more, INFINITY, near, 0, targets))
            Py_CLEAR(targets);
        else
            no_room += PyList_GET_SIZE(targets) == before, left -= more;
    }
    return targets ? Py_BuildValue("(Nl)", targets, no_room) : NULL;
}

typedef struct {
    int place, expert, tiles;
    float value;
} Member;

/* Reads lists of experts and tiles of one layer, by falling value, or rising where `rising`; equal ones as they are.
 * NULL with an exception. */
static Member *read_members(Table *t, int layer, PyObject *experts, PyObject *tiles, int rising, int *size) {
    if (!PyList_Check(experts) || !PyList_Check(tiles) || PyList_GET_SIZE(experts) != PyList_GET_SIZE(tiles))
        return PyErr_SetString(PyExc_TypeError, "experts and tiles: lists of one length"), NULL;
    *size = (int)PyList_GET_SIZE(experts);
    Member *found = PyMem_Malloc((*size + 1) * sizeof(*found));
    if (!found) return PyErr_NoMemory(), NULL;
    for (int i = 0; i < *size; i++) {
        long expert = PyLong_AsLong(PyList_GET_ITEM(experts, i)), held = PyLong_AsLong(PyList_GET_ITEM(tiles, i));
        if (PyErr_Occurred() || expert < 0 || expert >= t->experts) {
            if (!PyErr_Occurred()) PyErr_SetString(PyExc_IndexError, "no such expert");
            PyMem_Free(found);
            return NULL;
        }
        float value = t->value[(size_t)layer * t->experts + expert];
        int at = i;
        for (; at && (rising ? found[at - 1].value > value : found[at - 1].value < value); at--)
            found[at] = found[at - 1];
        found[at] = (Member){i, (int)expert, (int)held, value};
    }
    return found;
}

/* moved(layer, experts, cuts, more, tiles, out) */
static PyObject *table_moved(Table *t, PyObject *const *args, Py_ssize_t count) {
    if (count != 6) return PyErr_SetString(PyExc_TypeError, "moved takes six arguments"), NULL;
    int layer = layer_of(t, args[0]), size;
    long more = PyLong_AsLong(args[3]), tiles = PyLong_AsLong(args[4]);
    if (PyErr_Occurred()) return NULL;
    Member *found = read_members(t, layer, args[1], args[2], more < 0, &size);
    if (!found) return NULL;
    Py_buffer out;
    if (PyObject_GetBuffer(args[5], &out, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE)) return PyMem_Free(found), NULL;
    PyObject *cuts = NULL;
    if (out.itemsize == 4 && out.len == 4 * (Py_ssize_t)t->experts)
        cuts = PyList_New(size);
    else
        PyErr_SetString(PyExc_ValueError, "out is int32 [experts]");
    for (int i = 0; cuts && i < size; i++) {
        long now = found[i].tiles, then = now + more;
        then = then < 0 ? 0 : then > tiles ? tiles : then;
        more -= then - now;
        ((int32_t *)out.buf)[found[i].expert] = (int32_t)then;
        PyObject *cut = PyLong_FromLong(then);
        if (cut)
            PyList_SET_ITEM(cuts, found[i].place, cut);
        else
            Py_CLEAR(cuts);
    }
    PyBuffer_Release(&out);
    PyMem_Free(found);
    return cuts;
}

/* fetch(layer, experts, more) */
static PyObject *table_fetch(Table *t, PyObject *const *args, Py_ssize_t count) {
    if (count != 3) return PyErr_SetString(PyExc_TypeError, "fetch takes three arguments"), NULL;
    int layer = layer_of(t, args[0]), size;
    if (layer < 0) return NULL;
    Member *found = read_members(t, layer, args[1], args[2], 0, &size);
    if (!found) return NULL;
    float *rank = t->rank + (size_t)layer * t->experts;
    for (int i = 0; i < size; i++) rank[found[i].expert] = INFINITY;
    t->lowest[layer] = -1;
    PyObject *targets = PyList_New(0);
    for (int i = 0; targets && i < size; i++) {
        if (found[i].tiles <= 0) continue;
        Py_ssize_t before = PyList_GET_SIZE(targets);
        if (grow(t, layer, found[i].expert, found[i].tiles, found[i].value, layer, 1, targets))
            Py_CLEAR(targets);
        else if (PyList_GET_SIZE(targets) == before)
            break;
    }
    ranked(t, layer);
    PyMem_Free(found);
    return targets;
}

static int table_init(Table *t, PyObject *args, PyObject *words) {
    static char *keywords[] = {"value", "empty", "rank", "noted", "averages", "target", "free", "made", NULL};
    PyObject *arrays[ARRAYS], *made;
    if (t->lowest) return PyErr_SetString(PyExc_TypeError, "made already"), -1;
    if (!PyArg_ParseTupleAndKeywords(args, words, "OOOOOOlO!", keywords, arrays, arrays + 1, arrays + 2, arrays + 3,
                                     arrays + 4, arrays + 5, &t->free, &PyType_Type, &made))
        return -1;
    for (int i = 0; i < ARRAYS; i++) {
        Py_buffer *buffer = t->buffers + i;
        if (PyObject_GetBuffer(arrays[i], buffer, PyBUF_C_CONTIGUOUS | PyBUF_WRITABLE)) return -1;
        if (buffer->itemsize != 4 || buffer->len != (i == AVERAGES ? 2 : 1) * t->buffers->len)
            return PyErr_SetString(PyExc_ValueError, "an array of another size"), -1;
    }
    if (t->buffers->ndim != 2) return PyErr_SetString(PyExc_ValueError, "value is [layers, experts]"), -1;
    t->layers = (int)t->buffers->shape[0], t->experts = (int)t->buffers->shape[1];
    t->value = t->buffers[VALUE].buf, t->empty = t->buffers[EMPTY].buf, t->rank = t->buffers[RANK].buf;
    t->noted = t->buffers[NOTED].buf, t->averages = t->buffers[AVERAGES].buf, t->target = t->buffers[TARGET].buf;
    t->made = (PyTypeObject *)Py_NewRef(made);
    if (!PyType_IsSubtype(t->made, &PyTuple_Type)) return PyErr_SetString(PyExc_TypeError, "made is a tuple"), -1;
    t->lowest = PyMem_Malloc((t->layers + 1) * sizeof(*t->lowest));
    if (!t->lowest) return PyErr_NoMemory(), -1;
    memset(t->lowest, 0xff, t->layers * sizeof(*t->lowest));
    return 0;
}

static void table_dealloc(Table *t) {
    PyTypeObject *type = Py_TYPE(t);
    for (int i = 0; i < ARRAYS; i++) PyBuffer_Release(t->buffers + i);
    PyMem_Free(t->lowest);
    Py_XDECREF(t->made);
    type->tp_free((PyObject *)t);
    Py_DECREF(type);
}

static PyMethodDef methods[] = {
    {"observe", (PyCFunction)(void (*)(void))table_observe, METH_FASTCALL, NULL},
    {"ahead", (PyCFunction)(void (*)(void))table_ahead, METH_FASTCALL, NULL},
    {"rank", (PyCFunction)table_rank, METH_NOARGS, NULL},
    {"grow", (PyCFunction)(void (*)(void))table_grow, METH_FASTCALL, NULL},
    {"moved", (PyCFunction)(void (*)(void))table_moved, METH_FASTCALL, NULL},
    {"fetch", (PyCFunction)(void (*)(void))table_fetch, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    {"free", T_LONG, offsetof(Table, free), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_new, PyType_GenericNew}, {Py_tp_init, table_init}, {Py_tp_dealloc, table_dealloc},
    {Py_tp_methods, methods},       {Py_tp_members, members}, {0, NULL},
};

static PyType_Spec spec = {"pipeline.policies._worth.Table", sizeof(Table), 0, Py_TPFLAGS_DEFAULT, slots};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_worth", NULL, -1, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__worth(void) {
    PyObject *made = PyModule_Create(&module), *type = PyType_FromSpec(&spec);
    if (!made || !type || PyModule_AddObjectRef(made, "Table", type) ||
        PyModule_AddIntConstant(made, "VERSION", VERSION)) {
        Py_XDECREF(made);
        Py_XDECREF(type);
        return NULL;
    }
    Py_DECREF(type);
    return made;
}
