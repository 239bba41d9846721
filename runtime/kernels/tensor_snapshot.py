"""Snapshots of tensors and containers, compared with the present ones by one call of compiled C.

What is compared in Python costs some microseconds for each tensor, which of many small ones is more
than their arithmetic. Compiled code compares a tensor in some ten nanoseconds. It uses the C API of
Python and no PyTorch header, which would take the C++ compiler a quarter of a minute.
"""

import ctypes
import functools
import types
import weakref
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import Tensor

from collage_fx.runtime import cpp_compiler
from collage_fx.runtime.residuals.dtensor import SHARD, SPEC, shard_of, spec_of
from collage_fx.runtime.residuals.memory import Apart
from collage_fx.runtime.torch_private import c_guards as guards

_SOURCE = r"""
#include <Python.h>
#include <algorithm>
#include <cstdint>
#include <vector>

struct Snapshot {
  PyObject *attributes, *containers, *number, *anything;
  PyObject *tensors, *written, *params, *without;
  PyObject *guards, *version, *grad;
  PyObject *wholes, *specs, *shard, *spec;
  void* (*address)(PyObject*);
  int64_t guarded, *addresses, *versions, *places, free, *given, *sizes, *bounds, bound;
};

static PyObject* get(PyObject* attribute, PyObject* of) {
  return reinterpret_cast<PyGetSetDescrObject*>(attribute)->d_getset->get(
      of, reinterpret_cast<PyGetSetDescrObject*>(attribute)->d_getset->closure);
}

static int64_t version_of(const Snapshot* s, PyObject* tensor) {
  PyObject* number = get(s->version, tensor);
  if (!number) {
    PyErr_Clear();
    return -1;
  }
  const int64_t found = PyLong_AsLongLong(number);
  Py_DECREF(number);
  return found;
}

static bool same(const Snapshot* s, PyObject* found, PyObject* expected) {
  if (found == expected || expected == s->anything) return true;
  if (expected == s->number) return PyFloat_CheckExact(found);
  return PyFloat_CheckExact(found) && PyFloat_CheckExact(expected) &&
         PyFloat_AS_DOUBLE(found) == PyFloat_AS_DOUBLE(expected);
}

static bool same_dict(const Snapshot* s, PyObject* dict, PyObject* items) {
  const Py_ssize_t size = PyTuple_GET_SIZE(items);
  if (PyDict_GET_SIZE(dict) * 2 != size) return false;
  PyObject *key, *value;
  Py_ssize_t at = 0, k = 0;
  while (PyDict_Next(dict, &at, &key, &value)) {
    if (k + 1 >= size || key != PyTuple_GET_ITEM(items, k)) return false;
    if (!same(s, value, PyTuple_GET_ITEM(items, k + 1))) return false;
    k += 2;
  }
  return k == size;
}

static bool same_list(PyObject* list, PyObject* items) {
  const Py_ssize_t size = PyTuple_GET_SIZE(items);
  if (PyList_GET_SIZE(list) != size) return false;
  for (Py_ssize_t k = 0; k < size; ++k)
    if (PyList_GET_ITEM(list, k) != PyTuple_GET_ITEM(items, k)) return false;
  return true;
}

static bool same_containers(const Snapshot* s) {
  const Py_ssize_t size = PyTuple_GET_SIZE(s->containers);
  for (Py_ssize_t k = 0; k < size; k += 2) {
    PyObject* one = PyTuple_GET_ITEM(s->containers, k);
    PyObject* items = PyTuple_GET_ITEM(s->containers, k + 1);
    if (PyDict_Check(one) ? !same_dict(s, one, items) : !same_list(one, items)) return false;
  }
  return true;
}

// -1 for a tensor without memory of its own, of which PyTorch throws an exception of C++.
static int64_t address_of(const Snapshot* s, PyObject* tensor) {
  try {
    return reinterpret_cast<int64_t>(s->address(tensor));
  } catch (...) {
    return -1;
  }
}

static bool same_tensors(const Snapshot* s) {
  const Py_ssize_t size = PyTuple_GET_SIZE(s->tensors);
  for (Py_ssize_t k = 0; k < size; ++k)
    if (address_of(s, PyTuple_GET_ITEM(s->tensors, k)) != s->addresses[k]) return false;
  const Py_ssize_t written = PyTuple_GET_SIZE(s->written);
  for (Py_ssize_t k = 0; k < written; ++k)
    if (version_of(s, PyTuple_GET_ITEM(s->written, k)) != s->versions[k]) return false;
  return true;
}

static bool same_shards(const Snapshot* s) {
  const Py_ssize_t size = PyTuple_GET_SIZE(s->wholes);
  for (Py_ssize_t k = 0; k < size; k += 2) {
    PyObject* found = PyObject_GetAttr(PyTuple_GET_ITEM(s->wholes, k), s->shard);
    if (!found) return false;
    Py_DECREF(found);
    if (found != PyTuple_GET_ITEM(s->wholes, k + 1)) return false;
  }
  return true;
}

// Of the gradient of a DTensor the shard, a new reference, if it is laid out as it was; or null.
static PyObject* shard_of(const Snapshot* s, PyObject* gradient, PyObject* expected) {
  PyObject* spec = PyObject_GetAttr(gradient, s->spec);
  if (!spec) PyErr_Clear();  // no DTensor any more
  const int same = spec ? PyObject_RichCompareBool(spec, expected, Py_EQ) : 0;
  Py_XDECREF(spec);
  return same > 0 ? PyObject_GetAttr(gradient, s->shard) : nullptr;
}

static bool no_gradients(const Snapshot* s) {
  const Py_ssize_t size = PyTuple_GET_SIZE(s->without);
  for (Py_ssize_t k = 0; k < size; ++k) {
    PyObject* found = get(s->grad, PyTuple_GET_ITEM(s->without, k));
    if (!found) return false;
    Py_DECREF(found);
    if (found != Py_None) return false;
  }
  return true;
}

// Whether a given tensor lies in memory of those that stay the same.
static bool within(const Snapshot* s, int64_t start, int64_t size) {
  const int64_t *begin = s->bounds, *end = begin + s->bound;
  const int64_t* at = std::upper_bound(begin, end, start);
  return size && ((at - begin) % 2 || (at != end && *at < start + size));
}

// Whether tensors that are others in each call are laid out as in the last: notes their addresses.
static int fit(const Snapshot* s, const std::vector<PyObject*>& given) {
  const Py_ssize_t size = given.size(), before = PyTuple_GET_SIZE(s->tensors);
  std::vector<PyObject*> all;
  all.reserve(s->guarded + size);
  for (int64_t k = 0; k < s->guarded; ++k) all.push_back(PyTuple_GET_ITEM(s->tensors, k));
  all.insert(all.end(), given.begin(), given.end());
  PyObject* answer = PyObject_Vectorcall(s->guards, all.data(), all.size(), nullptr);
  if (!answer) return -1;
  const int alike = PyObject_IsTrue(answer);
  Py_DECREF(answer);
  for (Py_ssize_t k = 0; alike > 0 && k < size; ++k) {
    const int64_t start = address_of(s, given[k]);
    if (start == s->addresses[before + k]) continue;
    if (start == -1 || within(s, start, s->sizes[k])) return 0;
    s->addresses[before + k] = start;
  }
  return alike;
}

static int same_gradients(const Snapshot* s, PyObject* more, std::vector<PyObject*>& grads) {
  const Py_ssize_t size = PyTuple_GET_SIZE(s->params);
  for (Py_ssize_t k = 0; k < size; ++k) {
    PyObject* found = get(s->grad, PyTuple_GET_ITEM(s->params, k));
    if (!found) return -1;
    grads.push_back(found);
    if (found == Py_None) return 0;
    PyObject* expected = PyTuple_GET_ITEM(s->specs, k);
    if (expected == Py_None) continue;
    PyObject* shard = shard_of(s, found, expected);
    if (!shard) return PyErr_Occurred() ? -1 : 0;
    grads.back() = shard;
    Py_DECREF(found);
  }
  for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(more); ++k) {
    Py_INCREF(PyTuple_GET_ITEM(more, k));
    grads.push_back(PyTuple_GET_ITEM(more, k));
  }
  return fit(s, grads);
}

extern "C" int unchanged(const Snapshot* s, PyObject* attributes, PyObject* more, PyObject* kept) {
  const bool alike = same_dict(s, attributes, s->attributes) && same_containers(s) &&
                     same_shards(s) && same_tensors(s) && no_gradients(s);
  if (!alike) return PyErr_Occurred() ? -1 : 0;
  std::vector<PyObject*> grads;
  int answer = same_gradients(s, more, grads);
  for (PyObject* one : grads) {
    if (answer > 0 && PyList_Append(kept, one) < 0) answer = -1;
    Py_DECREF(one);
  }
  return answer;
}

extern "C" int holds(const Snapshot* s, PyObject* args) {
  const Py_ssize_t size = PyTuple_GET_SIZE(s->tensors);
  if (size < s->guarded) return 0;  // another thread has let go of them
  for (Py_ssize_t k = 0; k < size; ++k)
    if (s->places[k] >= 0 &&
        PyTuple_GET_ITEM(args, s->places[k]) != PyTuple_GET_ITEM(s->tensors, k))
      return 0;
  if (!same_tensors(s)) return PyErr_Occurred() ? -1 : 0;
  std::vector<PyObject*> given;
  for (int64_t k = 0; k < s->free; ++k) given.push_back(PyTuple_GET_ITEM(args, s->given[k]));
  return fit(s, given);
}

extern "C" void gather(const int64_t* addresses, const int64_t* source, const int64_t* offset,
                       int64_t size, int64_t* table) {
  for (int64_t k = 0; k < size; ++k) table[k] = addresses[source[k]] + offset[k];
}

// All the bits of addresses, one or another of which has them.
extern "C" int64_t bits(const int64_t* addresses, const int64_t* source, const int64_t* offset,
                        int64_t size) {
  int64_t found = 0;
  for (int64_t k = 0; k < size; ++k) found |= addresses[source[k]] + offset[k];
  return found;
}

extern "C" void settle(const Snapshot* s) {
  const Py_ssize_t written = PyTuple_GET_SIZE(s->written);
  for (Py_ssize_t k = 0; k < written; ++k)
    s->versions[k] = version_of(s, PyTuple_GET_ITEM(s->written, k));
}
"""
_ATTRIBUTE = types.GetSetDescriptorType
NUMBER, ANYTHING = object(), object()
"""Stand for whatever float, or whatever there is, as the value of a key."""


class _Fields(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.py_object) for name in ("attributes", "containers", "number", "anything")),
        *((name, ctypes.py_object) for name in ("tensors", "written", "params", "without")),
        *((name, ctypes.py_object) for name in ("guards", "version", "grad")),
        *((name, ctypes.py_object) for name in ("wholes", "specs", "shard", "spec")),
        ("address", ctypes.c_void_p),
        ("guarded", ctypes.c_int64),
        ("addresses", ctypes.c_void_p),
        ("versions", ctypes.c_void_p),
        ("places", ctypes.c_void_p),
        ("free", ctypes.c_int64),
        ("given", ctypes.c_void_p),
        ("sizes", ctypes.c_void_p),
        ("bounds", ctypes.c_void_p),
        ("bound", ctypes.c_int64),
    ]


@functools.cache
def _library() -> Any:
    """Return the compiled functions, which hold the lock of the interpreter while they run."""
    library = ctypes.PyDLL(cpp_compiler.load(_SOURCE)._name)
    library.unchanged.restype = library.holds.restype = ctypes.c_int
    library.bits.restype = ctypes.c_int64
    library.settle.restype = library.gather.restype = None
    return library


@dataclass(kw_only=True)
class Contents:
    """Tensors, and what they are found in: the arguments of a call, or containers."""

    guarded: Sequence[Tensor]
    """Tensors of which all is compared: the object, its address, and what `alike` does."""
    others: Sequence[Tensor]
    """Tensors of which the object and its address are compared."""
    written: Sequence[Tensor]
    """Tensors among them whose version counter is compared with the last that was noted."""
    given: Sequence[Tensor]
    """Tensors that may be others in each call, if these are like the present ones, and lie in no
    memory of tensors that are compared, unless in the same place."""
    alike: Callable[..., bool]
    """Predicate: its arguments, the guarded tensors and the given ones, are what they were in
    class, dtype, device, sizes and strides."""

    arguments: Sequence[int] = ()
    """Position of each guarded tensor among the arguments, -1 for none."""
    given_arguments: Sequence[int] = ()
    """Position of each given tensor among the arguments."""

    attributes: Sequence[Any] = ()
    """The items of a dict that is handed to each comparison, since it is not to be kept alive."""
    containers: Sequence[tuple[Any, Iterable[Any]]] = ()
    """Lists and dicts, each with its items: of a dict key, value, key, value. Floats are compared
    by value, all else by identity, and `NUMBER` and `ANYTHING` stand for others."""
    params: Sequence[Tensor] = ()
    """Tensors whose gradients are the first of the given ones: those of DTensors in their layout,
    and their shards."""
    sharded: Sequence[Tensor] = ()
    """DTensors that have the same shards; these are among the guarded tensors."""
    without: Sequence[Tensor] = ()
    """Tensors that have no gradient."""


class Addresses:
    """Some of the addresses of a snapshot, each with bytes to be added to it."""

    def __init__(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Take places in `TensorSnapshot.addresses`, and bytes."""
        self._source = array("q", [place for place, _ in pairs])
        self._offset = array("q", [offset for _, offset in pairs])
        self.arguments = _pointer(self._source), _pointer(self._offset), ctypes.c_int64(len(pairs))
        """Arguments of compiled functions: pointers to the places and the bytes, and the count."""

    def __len__(self) -> int:
        return len(self._source)


def _pointer(numbers: "array[int]") -> ctypes.c_void_p:
    """Return a pointer to an array, which keeps its size."""
    return ctypes.c_void_p(numbers.buffer_info()[0])


class TensorSnapshot:
    """Snapshot of tensors and containers."""

    def __init__(self, contents: Contents, more: int = 0, *, keeps: bool = True) -> None:
        """Take the snapshot, all versions as they are.

        Args:
            contents: what is compared.
            more: how many addresses of other tensors the caller will put at the end of `addresses`.
            keeps: whether the tensors that are compared are kept alive; if not, they are there from
                a comparison with arguments that holds until `let_go`.

        Raises RuntimeError and what compiling raises if this PyTorch, or this machine, cannot.
        """
        base = vars(Tensor.__base__)
        version, grad = base["_version"], base["grad"]
        if not isinstance(version, _ATTRIBUTE) or not isinstance(grad, _ATTRIBUTE):
            raise RuntimeError("attributes of tensors are not what they are compiled for")
        self.tensors: tuple[Tensor, ...] = (*contents.guarded, *contents.others)
        self.params = tuple(contents.params)
        self.written: tuple[Tensor, ...] = tuple(contents.written)
        grads = [p.grad for p in self.params if p.grad is not None]
        present = [t.data_ptr() for t in (*self.tensors, *contents.given)]
        self.addresses = array("q", [*present, *[0] * more])
        """Addresses of the guarded tensors, the others, the last call's given ones, and more."""
        self.versions = array("q", [t._version for t in self.written])
        nowhere = [-1] * (len(self.tensors) - len(contents.arguments))
        self.places = array("q", [*contents.arguments, *nowhere])
        self.given = array("q", contents.given_arguments)
        apart = Apart(self.tensors, contents.given)
        self.sizes, self.bounds = array("q", apart.other_sizes), array("q", apart.bounds)
        items = [(one, tuple(found)) for one, found in contents.containers]
        sharded = [(t, shard_of(t)) for t in contents.sharded]
        self._kept = _Fields(
            tuple(contents.attributes),
            tuple(chain.from_iterable(items)),
            NUMBER,
            ANYTHING,
            self.tensors,
            self.written,
            self.params,
            tuple(contents.without),
            contents.alike,
            version,
            grad,
            tuple(chain.from_iterable(sharded)),
            tuple(map(spec_of, grads) if sharded else [None] * len(grads)),
            SHARD,
            SPEC,
            guards._torchinductor_pyobject_tensor_data_ptr,  # type: ignore[attr-defined]
            len(contents.guarded),
            self.addresses.buffer_info()[0],
            self.versions.buffer_info()[0],
            self.places.buffer_info()[0],
            len(self.given),
            self.given.buffer_info()[0],
            self.sizes.buffer_info()[0],
            self.bounds.buffer_info()[0],
            len(self.bounds),
        )
        self._at, self._start = ctypes.byref(self._kept), _pointer(self.addresses)
        self._library = _library()
        self._references: list[weakref.ref[Tensor]] | None = None
        if not keeps:
            self._references = list(map(weakref.ref, self.tensors))
            at = {id(t): k for k, t in enumerate(self.tensors)}
            self._places = [at[id(t)] for t in self.written]
            self.let_go()

    def let_go(self) -> None:
        """Keep no tensor alive until the next comparison, unless all are kept for good."""
        if self._references is not None:
            self._take(())

    def _take(self, tensors: tuple[Tensor, ...]) -> None:
        self.tensors = self._kept.tensors = tensors
        self.written = tuple([tensors[k] for k in self._places]) if tensors else ()
        self._kept.written = self.written

    def _are_there(self) -> bool:
        """Return True if no tensor has gone; `tensors` has them then."""
        if self._references is not None:
            found = [find() for find in self._references]
            if any([t is None for t in found]):
                return False
            self._take(tuple(found))  # type: ignore[arg-type]
        return True

    def unchanged(self, attributes: dict[str, Any], more: Sequence[Tensor] = ()) -> list[Tensor]:
        """Return the given tensors, whose addresses `addresses` has then, if all is as it was.

        These are the gradients, of DTensors the shards, and `more`. They are to be kept until
        nothing uses the addresses any more: another thread, or a hook, may take gradients from
        their parameters. An empty list if something has changed.
        """
        given: list[Tensor] = []
        found = ctypes.py_object(attributes), ctypes.py_object(tuple(more)), ctypes.py_object(given)
        return given if self._library.unchanged(self._at, *found) else []

    def holds(self, args: tuple[Any, ...]) -> bool:
        """Return True if the arguments of a call are as they were; `addresses` has theirs then."""
        return self._are_there() and bool(self._library.holds(self._at, ctypes.py_object(args)))

    def gather(self, found: "Addresses", table: int) -> None:
        """Write addresses to the memory at an address."""
        self._library.gather(self._start, *found.arguments, ctypes.c_void_p(table))

    def bits(self, found: "Addresses") -> int:
        """Return the bits that any of the addresses has: they are as aligned as this number."""
        return int(self._library.bits(self._start, *found.arguments))

    def settle(self) -> None:
        """Note the versions as they are now."""
        self._library.settle(self._at)
