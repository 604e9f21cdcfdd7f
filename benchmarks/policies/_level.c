/* A level of benchmarks/policies/level.py with the adaptive policy, in C: the same calls of the same
 * loops, block by block, without an object for each.
 */

#define PyInit__panel make_panel_module
#include "../../policy/_panel.c"

typedef struct {
    PyObject_HEAD
    Panel *panel;
    int64_t size, unique, free;
    uint64_t *tags; /* of each block of the trace */
    int32_t *at;    /* handle of each block, -1 if it is not there */
    int32_t *block; /* of each handle; behind those that are in use, handles that are free */
    int32_t *spare;
    Asked *asked;
    Py_ssize_t asked_room;
    Walk walk;
} Level;

/* A free handle; evicts for it. -1 with an error set. */
static int32_t room_of(Level *self) {
    if (self->free) return self->spare[--self->free];
    Walk *walk = &self->walk;
    walk->panel = self->panel;
    walk->priority = walk->slots = walk->left = 0;
    walk->front = -1;
    memset(walk->at, 0xFF, sizeof walk->at);
    int32_t gone = step(walk);
    if (gone < 0) {
        PyErr_SetString(PyExc_AssertionError, "no victim");
        return -1;
    }
    self->at[self->block[gone]] = -1;
    return remove_one(self->panel, gone) < 0 || drop_one(self->panel, gone, 1) < 0 ? -1 : gone;
}

static int serve(Level *self, int32_t block, int priority) {
    int32_t handle = self->at[block];
    if (handle >= 0) return touch_one(self->panel, handle);
    if ((handle = room_of(self)) < 0) return -1;
    self->at[block] = handle;
    self->block[handle] = block;
    if (insert_one(self->panel, handle, self->tags[block], 1) < 0) return -1;
    return push_one(self->panel, handle, priority, 0);
}

/* Blocks as given; NULL with an error set. */
static int32_t *blocks_of(Level *self, PyObject *given, Py_ssize_t *count) {
    int32_t *blocks = handles_of(given, count);
    for (Py_ssize_t at = 0; blocks && at < *count; at++)
        if (blocks[at] < 0 || blocks[at] >= self->unique) {
            PyErr_Format(PyExc_IndexError, "no block: %d", blocks[at]);
            PyMem_RawFree(blocks);
            return NULL;
        }
    return blocks;
}

/* request(blocks, in_session, priority): serve a prompt; how many leading blocks were there. */
static PyObject *level_request(Level *self, PyObject *const *given, Py_ssize_t given_count) {
    if (!require(given_count, 3)) return NULL;
    int in_session = PyObject_IsTrue(given[1]), priority = priority_of(given[2]);
    Py_ssize_t count, known = 0;
    int32_t *blocks = priority < 0 ? NULL : blocks_of(self, given[0], &count);
    if (!blocks) return NULL;
    if (count > self->asked_room) {
        Asked *asked = PyMem_RawRealloc(self->asked, (size_t)count * sizeof *asked);
        if (asked) {
            self->asked = asked;
            self->asked_room = count;
        }
    }
    int failed = count > self->asked_room;
    if (failed) PyErr_NoMemory();
    for (Py_ssize_t at = 0; !failed && at < count; at++) {
        int32_t handle = self->at[blocks[at]];
        self->asked[at] = (Asked){self->tags[blocks[at]], handle, 0};
        known += known == at && handle >= 0;
    }
    failed = failed || ask(self->panel, self->asked, count, in_session) < 0;
    for (Py_ssize_t at = count - 1; !failed && at >= 0; at--)
        failed = serve(self, blocks[at], priority) < 0;
    PyMem_RawFree(blocks);
    return failed ? NULL : PyLong_FromSsize_t(known);
}

/* rank(blocks, priority): change the priority of those that are there, the tail first. */
static PyObject *level_rank(Level *self, PyObject *const *given, Py_ssize_t given_count) {
    if (!require(given_count, 2)) return NULL;
    int priority = priority_of(given[1]), failed = 0;
    Py_ssize_t count;
    int32_t *blocks = priority < 0 ? NULL : blocks_of(self, given[0], &count);
    if (!blocks) return NULL;
    for (Py_ssize_t at = count - 1; !failed && at >= 0; at--) {
        int32_t handle = self->at[blocks[at]];
        if (handle < 0 || self->panel->blocks[handle].priority == priority) continue;
        failed = remove_one(self->panel, handle) < 0 ||
                 push_one(self->panel, handle, priority, 0) < 0;
    }
    PyMem_RawFree(blocks);
    if (failed) return NULL;
    Py_RETURN_NONE;
}

static PyObject *level_rule(Level *self, PyObject *unused) {
    return PyLong_FromLong(self->panel->rule);
}

/* keep(rule): order by one rule, whatever the shadows say. */
static PyObject *level_keep(Level *self, PyObject *given) {
    long rule = PyLong_AsLong(given);
    if (rule < 0 || rule >= RULES) {
        if (!PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "no rule: %ld", rule);
        return NULL;
    }
    self->panel->rule = (int)rule;
    self->panel->choose_at = INT64_MAX;
    Py_RETURN_NONE;
}

static void level_free(Level *self) {
    PyTypeObject *type = Py_TYPE(self);
    void *parts[] = {self->tags, self->at, self->block, self->spare, self->asked};
    for (size_t at = 0; at < sizeof parts / sizeof *parts; at++) PyMem_RawFree(parts[at]);
    Py_XDECREF(self->panel);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

static PyTypeObject *panel_type;

/* Level(size, keys): of so many places; the key of each block of the trace. */
static PyObject *level_new(PyTypeObject *type, PyObject *given, PyObject *named) {
    Py_ssize_t size;
    PyObject *keys;
    if (!PyArg_ParseTuple(given, "nO", &size, &keys)) return NULL;
    PyObject *items = PySequence_Fast(keys, "expected keys");
    if (!items) return NULL;
    Level *self = (Level *)type->tp_alloc(type, 0);
    if (self) {
        size_t unique = (size_t)PySequence_Fast_GET_SIZE(items);
        self->size = self->free = size;
        self->unique = (int64_t)unique;
        self->panel = (Panel *)PyObject_CallFunction((PyObject *)panel_type, "n", size);
        self->tags = PyMem_RawCalloc(unique, sizeof *self->tags);
        self->at = PyMem_RawMalloc(unique * sizeof *self->at);
        self->block = PyMem_RawCalloc((size_t)size, sizeof *self->block);
        self->spare = PyMem_RawCalloc((size_t)size, sizeof *self->spare);
        if (self->tags && self->at && self->block && self->spare && self->panel) {
            memset(self->at, 0xFF, unique * sizeof *self->at);
            for (size_t at = 0; at < unique && !PyErr_Occurred(); at++)
                self->tags[at] = tag_of_key(PySequence_Fast_GET_ITEM(items, (Py_ssize_t)at));
            for (int64_t at = 0; at < size; at++) self->spare[at] = (int32_t)(size - 1 - at);
        } else {
            PyErr_NoMemory();
        }
        if (PyErr_Occurred()) Py_CLEAR(self);
    }
    Py_DECREF(items);
    return (PyObject *)self;
}

static PyMethodDef level_methods[] = {
    {"request", (PyCFunction)(void (*)(void))level_request, METH_FASTCALL, NULL},
    {"rank", (PyCFunction)(void (*)(void))level_rank, METH_FASTCALL, NULL},
    {"keep", (PyCFunction)(void (*)(void))level_keep, METH_O, NULL},
    {"rule", (PyCFunction)(void (*)(void))level_rule, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot level_slots[] = {
    {Py_tp_new, level_new}, {Py_tp_dealloc, level_free}, {Py_tp_methods, level_methods}, {0, NULL},
};
static PyType_Spec level_spec = {"_level.Level", sizeof(Level), 0, Py_TPFLAGS_DEFAULT,
                                 level_slots};
static struct PyModuleDef level_module = {PyModuleDef_HEAD_INIT, "_level", NULL, -1, NULL,
                                          NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__level(void) {
    PyObject *panels = make_panel_module(), *made = PyModule_Create(&level_module);
    PyObject *type = PyType_FromSpec(&level_spec);
    panel_type = panels ? (PyTypeObject *)PyObject_GetAttrString(panels, "Panel") : NULL;
    if (!made || !type || !panel_type || PyModule_AddObjectRef(made, "Level", type) < 0) {
        Py_XDECREF(made);
        made = NULL;
    }
    Py_XDECREF(panels);
    Py_XDECREF(type);
    return made;
}
