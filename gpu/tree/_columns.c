/* The loops of kvladder/gpu/tree/columns.py over lists and dictionaries, in C.
 *
 * Each function does what the one of the same name does there, for lists of integers, NumPy's
 * included; what is not in range raises IndexError and what is not a list or an integer TypeError,
 * as there. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

static PyObject *zero, *one;

/* The integer in `object`, as near to it as fits; -1 with TypeError set if it is none. */
static inline Py_ssize_t integer(PyObject *object) {
    Py_ssize_t value = PyLong_CheckExact(object) ? PyLong_AsSsize_t(object) : -1;
    if (value != -1) return value;
    PyErr_Clear();
    return PyNumber_AsSsize_t(object, NULL);
}

/* The integer in `object` if it is a row of a list of `size`, else -1 with an error set. */
static inline Py_ssize_t row_of(PyObject *object, Py_ssize_t size) {
    Py_ssize_t row = integer(object);
    if (row >= 0 && row < size) return row;
    if (!PyErr_Occurred()) PyErr_Format(PyExc_IndexError, "row %zd of %zd", row, size);
    return -1;
}

static void put(PyObject *column, Py_ssize_t row, PyObject *value) {
    PyObject *old = PyList_GET_ITEM(column, row);
    Py_INCREF(value);
    PyList_SET_ITEM(column, row, value);
    Py_DECREF(old);
}

static int require_lists(PyObject *const *arguments, Py_ssize_t count) {
    for (Py_ssize_t at = 0; at < count; at++)
        if (!PyList_CheckExact(arguments[at])) {
            PyErr_SetString(PyExc_TypeError, "expected a list");
            return 0;
        }
    return 1;
}

static int require_count(Py_ssize_t count, Py_ssize_t expected) {
    if (count == expected) return 1;
    PyErr_Format(PyExc_TypeError, "%zd arguments: expected %zd", count, expected);
    return 0;
}

static int require_dict(PyObject *argument) {
    if (PyDict_CheckExact(argument)) return 1;
    PyErr_SetString(PyExc_TypeError, "expected a dict");
    return 0;
}

static PyObject *gather(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    if (!require_count(count, 2) || !require_lists(arguments, 1)) return NULL;
    PyObject *column = arguments[0];
    PyObject *rows = PySequence_Fast(arguments[1], "expected rows");
    if (!rows) return NULL;
    Py_ssize_t size = PySequence_Fast_GET_SIZE(rows);
    PyObject *found = PyList_New(size);
    for (Py_ssize_t at = 0; found && at < size; at++) {
        Py_ssize_t row = row_of(PySequence_Fast_GET_ITEM(rows, at), PyList_GET_SIZE(column));
        if (row < 0) {
            Py_CLEAR(found);
            break;
        }
        PyObject *value = PyList_GET_ITEM(column, row);
        Py_INCREF(value);
        PyList_SET_ITEM(found, at, value);
    }
    Py_DECREF(rows);
    return found;
}

static PyObject *fill(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    if (!require_count(count, 3) || !require_lists(arguments, 1)) return NULL;
    PyObject *rows = PySequence_Fast(arguments[1], "expected rows");
    if (!rows) return NULL;
    for (Py_ssize_t at = 0; at < PySequence_Fast_GET_SIZE(rows); at++) {
        PyObject *column = arguments[0];
        Py_ssize_t row = row_of(PySequence_Fast_GET_ITEM(rows, at), PyList_GET_SIZE(column));
        if (row < 0) {
            Py_DECREF(rows);
            return NULL;
        }
        put(column, row, arguments[2]);
    }
    Py_DECREF(rows);
    Py_RETURN_NONE;
}

static PyObject *scatter(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    if (!require_count(count, 3) || !require_lists(arguments, 1)) return NULL;
    PyObject *column = arguments[0], *done = NULL;
    PyObject *rows = PySequence_Fast(arguments[1], "expected rows");
    PyObject *values = PySequence_Fast(arguments[2], "expected values");
    if (!rows || !values) goto end;
    if (PySequence_Fast_GET_SIZE(rows) != PySequence_Fast_GET_SIZE(values)) {
        PyErr_SetString(PyExc_ValueError, "not as many values as rows");
        goto end;
    }
    for (Py_ssize_t at = 0; at < PySequence_Fast_GET_SIZE(rows); at++) {
        Py_ssize_t row = row_of(PySequence_Fast_GET_ITEM(rows, at), PyList_GET_SIZE(column));
        if (row < 0) goto end;
        put(column, row, PySequence_Fast_GET_ITEM(values, at));
    }
    done = Py_NewRef(Py_None);
end:
    Py_XDECREF(rows);
    Py_XDECREF(values);
    return done;
}

static PyObject *number(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    if (!require_count(count, 4) || !require_lists(arguments, 2)) return NULL;
    PyObject *column = arguments[0], *rows = arguments[1];
    long long value = PyLong_AsLongLong(arguments[2]), step = PyLong_AsLongLong(arguments[3]);
    if (PyErr_Occurred()) return NULL;
    for (Py_ssize_t at = 0; at < PyList_GET_SIZE(rows); at++, value += step) {
        Py_ssize_t row = row_of(PyList_GET_ITEM(rows, at), PyList_GET_SIZE(column));
        PyObject *made = row < 0 ? NULL : PyLong_FromLongLong(value);
        if (!made) return NULL;
        PyObject *old = PyList_GET_ITEM(column, row);
        PyList_SET_ITEM(column, row, made);
        Py_DECREF(old);
    }
    Py_RETURN_NONE;
}

/* What is in the rows, the last first; NULL, maybe without an error, if one is not to be in it. */
static PyObject *full(PyObject *column, PyObject *rows, PyObject *empty) {
    Py_ssize_t size = PySequence_Fast_GET_SIZE(rows);
    PyObject *found = PyList_New(size);
    for (Py_ssize_t at = 0; found && at < size; at++) {
        Py_ssize_t row = row_of(PySequence_Fast_GET_ITEM(rows, at), PyList_GET_SIZE(column));
        PyObject *value = row < 0 ? empty : PyList_GET_ITEM(column, row);
        if (value == empty) {
            Py_CLEAR(found);
        } else {
            Py_INCREF(value);
            PyList_SET_ITEM(found, size - 1 - at, value);
        }
    }
    return found;
}

static PyObject *split(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    if (!require_count(count, 3) || !require_lists(arguments, 1)) return NULL;
    PyObject *column = arguments[0], *empty = arguments[2];
    PyObject *rows = PySequence_Fast(arguments[1], "expected rows");
    PyObject *without = PyList_New(0), *with = NULL, *both = NULL;
    if (!rows || !without) goto end;
    with = full(column, rows, empty);
    if (with || PyErr_Occurred()) {
        if (with) both = PyTuple_Pack(2, without, with);
        goto end;
    }
    with = PyList_New(0);
    if (!with) goto end;
    for (Py_ssize_t at = PySequence_Fast_GET_SIZE(rows) - 1; at >= 0; at--) {
        PyObject *name = PySequence_Fast_GET_ITEM(rows, at);
        Py_ssize_t row = row_of(name, PyList_GET_SIZE(column));
        if (row < 0) goto end;
        PyObject *value = PyList_GET_ITEM(column, row);
        int same = value == empty ? 1 : PyObject_RichCompareBool(value, empty, Py_EQ);
        if (same < 0 || PyList_Append(same ? without : with, same ? name : value) < 0) goto end;
    }
    if (PyList_Reverse(without) == 0) both = PyTuple_Pack(2, without, with);
end:
    Py_XDECREF(rows);
    Py_XDECREF(without);
    Py_XDECREF(with);
    return both;
}

static PyObject *drop_ones(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    if (!require_count(count, 2) || !require_lists(arguments, 1)) return NULL;
    PyObject *column = arguments[0];
    PyObject *rows = PySequence_Fast(arguments[1], "expected rows");
    if (!rows) return NULL;
    Py_ssize_t size = PySequence_Fast_GET_SIZE(rows), at;
    int wrong = 0;
    for (at = 0; at < size; at++) {
        Py_ssize_t row = integer(PySequence_Fast_GET_ITEM(rows, at));
        wrong = row == -1 && PyErr_Occurred();
        if (wrong || row < 0 || row >= PyList_GET_SIZE(column) ||
            PyList_GET_ITEM(column, row) != one)
            break;
        put(column, row, zero);
    }
    if (wrong) PyErr_Clear(); /* and raised again below: what comes between may call Python */
    for (Py_ssize_t back = at - 1; at < size && back >= 0; back--)
        put(column, integer(PySequence_Fast_GET_ITEM(rows, back)), one);
    if (wrong) integer(PySequence_Fast_GET_ITEM(rows, at));
    Py_DECREF(rows);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(at == size);
}

static PyObject *forget(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    if (!require_count(count, 2) || !require_lists(arguments + 1, 1)) return NULL;
    if (!require_dict(arguments[0])) return NULL;
    for (Py_ssize_t at = 0; at < PyList_GET_SIZE(arguments[1]); at++)
        if (PyDict_DelItem(arguments[0], PyList_GET_ITEM(arguments[1], at)) < 0) return NULL;
    Py_RETURN_NONE;
}

static PyObject *leading(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    if (!require_count(count, 4) || !require_dict(arguments[0]) || !require_lists(arguments + 2, 1))
        return NULL;
    Py_ssize_t empty = integer(arguments[3]);
    if (PyErr_Occurred()) return NULL;
    PyObject *known = arguments[0], *column = arguments[2], *found = PyList_New(0);
    PyObject *keys = PySequence_Fast(arguments[1], "expected keys");
    for (Py_ssize_t at = 0; found && keys && at < PySequence_Fast_GET_SIZE(keys); at++) {
        PyObject *node = PyDict_GetItemWithError(known, PySequence_Fast_GET_ITEM(keys, at));
        if (!node) break;
        Py_ssize_t row = row_of(node, PyList_GET_SIZE(column));
        if (row < 0 || integer(PyList_GET_ITEM(column, row)) == empty) break;
        if (PyErr_Occurred() || PyList_Append(found, node) < 0) break;
    }
    Py_XDECREF(keys);
    if (PyErr_Occurred()) Py_CLEAR(found);
    return found;
}

static int count_up(PyObject *counts, PyObject *key) {
    PyObject *before = PyDict_GetItemWithError(counts, key);
    if (!before && PyErr_Occurred()) return -1;
    PyObject *after = PyLong_FromLong((before ? PyLong_AsLong(before) : 0) + 1);
    int done = after ? PyDict_SetItem(counts, key, after) : -1;
    Py_XDECREF(after);
    return done;
}

static PyObject *forget_single(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    if (!require_count(count, 2) || !require_lists(arguments + 1, 1)) return NULL;
    if (!require_dict(arguments[0])) return NULL;
    PyObject *held = arguments[0], *left = PyDict_New();
    for (Py_ssize_t at = 0; left && at < PyList_GET_SIZE(arguments[1]); at++) {
        PyObject *key = PyList_GET_ITEM(arguments[1], at);
        PyObject *value = PyDict_GetItemWithError(held, key);
        if (!value && !PyErr_Occurred()) PyErr_SetObject(PyExc_KeyError, key);
        if (!value ||
            (PyLong_Check(value) ? PyDict_DelItem(held, key) : count_up(left, key)) < 0)
            Py_CLEAR(left);
    }
    return left;
}

/* The mark at a place of a run: of a list, or of a range, whose numbers are not made for it. */
static long long mark_at(PyObject *marks, Py_ssize_t at, long long first, long long step) {
    return PyList_CheckExact(marks) ? PyLong_AsLongLong(PyList_GET_ITEM(marks, at))
                                    : first + at * step;
}

static long long number_of(PyObject *object, const char *name) {
    PyObject *value = PyObject_GetAttrString(object, name);
    long long number = value ? PyLong_AsLongLong(value) : -1;
    Py_XDECREF(value);
    return number;
}

static PyObject *drain(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    if (!require_count(count, 9) || !require_lists(arguments, 1) ||
        !require_lists(arguments + 4, 3) || !require_lists(arguments + 8, 1))
        return NULL;
    PyObject *nodes = arguments[0], *stamp = arguments[4], *kids = arguments[5];
    PyObject *parent = arguments[6], *parked = arguments[7], *victims = arguments[8];
    PyObject *marks = arguments[1];
    int listed = PyList_CheckExact(marks);
    long long first = listed ? 0 : number_of(marks, "start");
    long long step = listed || PyErr_Occurred() ? 0 : number_of(marks, "step");
    Py_ssize_t at = PyLong_AsSsize_t(arguments[2]), end = PyLong_AsSsize_t(arguments[3]);
    if (PyErr_Occurred()) return NULL;
    if (at < 0 || end > PyList_GET_SIZE(nodes) || (listed && end > PyList_GET_SIZE(marks))) {
        PyErr_SetString(PyExc_IndexError, "beyond the end of the run");
        return NULL;
    }
    while (at < end) {
        long long mark = mark_at(marks, at, first, step);
        PyObject *node = PyList_GET_ITEM(nodes, at++);
        Py_ssize_t row = row_of(node, PyList_GET_SIZE(stamp));
        if (row < 0 || row_of(node, PyList_GET_SIZE(kids)) < 0) return NULL;
        if (PyLong_AsLongLong(PyList_GET_ITEM(stamp, row)) != mark) continue;
        long left = PyLong_AsLong(PyList_GET_ITEM(kids, row));
        PyObject *changed = PyLong_FromLongLong(left ? mark | 1 : -mark);
        if (!changed) return NULL;
        put(stamp, row, changed);
        Py_DECREF(changed);
        if (left) {
            if (PySet_Add(parked, node) < 0) return NULL;
            continue;
        }
        if (PyList_Append(victims, node) < 0) return NULL;
        if (row_of(node, PyList_GET_SIZE(parent)) < 0) return NULL;
        PyObject *above = PyList_GET_ITEM(parent, row);
        Py_ssize_t over = row_of(above, PyList_GET_SIZE(kids));
        if (over < 0) return NULL;
        left = PyLong_AsLong(PyList_GET_ITEM(kids, over)) - 1;
        PyObject *fewer = PyLong_FromLong(left);
        if (!fewer) return NULL;
        put(kids, over, fewer);
        Py_DECREF(fewer);
        if (!left && PySet_GET_SIZE(parked)) {
            int waits = PySet_Contains(parked, above);
            if (waits < 0) return NULL;
            if (waits) return Py_BuildValue("nO", at, above);
        }
    }
    return PyErr_Occurred() ? NULL : Py_BuildValue("ni", at, -1);
}

#define METHOD(name) {#name, (PyCFunction)(void (*)(void))name, METH_FASTCALL, NULL}
static PyMethodDef methods[] = {
    METHOD(gather), METHOD(fill),   METHOD(number),        METHOD(split), METHOD(drop_ones),
    METHOD(forget), METHOD(forget_single), METHOD(drain), METHOD(scatter), METHOD(leading),
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_columns", NULL, -1, methods,
                                    NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__columns(void) {
    zero = PyLong_FromLong(0);
    one = PyLong_FromLong(1);
    return zero && one ? PyModule_Create(&module) : NULL;
}
