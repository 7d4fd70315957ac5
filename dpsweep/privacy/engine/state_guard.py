"""Everything a model could remember an example by, compared bit by bit after every batch.

The accountant needs each example's gradient to be a function of that example and of past releases.
A module that writes to itself in `forward` breaks that: what it keeps of one example reaches other
examples' gradients, later steps, or the file of weights, past clipping and noise.

**Watched.** From the model down: parameters at every query point, buffers, and all that is in
`vars()` of a module, of an object of a class that comes neither with Python nor with torch, and of
such a class itself; lists, dicts, tuples, sets and deques in them, however deep. Tensors, NumPy
arrays and random generators are compared by value, all else by identity, then by type and `==`.
torch's own entries of `vars(module)` are walked like any other, so that a layer, a buffer or a hook
that is added is seen too.

**Not watched.** What functions hold (closures, defaults, globals), objects of Python's and torch's
own classes (files, locks, optimizers), and what is outside Python. What such a memory does to the
outputs is looked for by repeatability.py.

**Caches.** A module may fill a cache at its first call and keep it, as rotary embeddings do, if the
cache depends on nothing but the shape of one example. `check_stateless` tries that before the first
step: two copies of the model, called on different random inputs, must hold the same afterwards, and
nothing may change in further calls, whatever their images, weights or number of rows. (The number
of rows is no public shape: the size of a Poisson batch is secret.) `warm_up` then fills the caches
of the model itself, on black images, and from there on nothing may change at all. Were the first
private batch let through instead, a cache could not be told from a memory of that batch.
"""

import copy
import random
import re
import sys
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from enum import Enum
from operator import is_
from types import MemberDescriptorType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dpsweep.core.errors import ConfigError
from dpsweep.core.flat import in_memory_order
from dpsweep.core.inputs import Inputs, device_of, zero_inputs
from dpsweep.core.types import InputSpec
from dpsweep.privacy.engine.calls import (
    call_model,
    draw_examples,
    isolate_generators,
    perturb_parameters,
)

Named = Iterable[tuple[str, Tensor]]
"""Tensors, and what each is called in an error."""

_REMEDY = (
    "What a model keeps of the examples that it sees gets past clipping and noise. Compute all "
    "that depends on the input anew in each call, and assign nothing in forward() to self, to a "
    "buffer or to a container"
)
_MOST = 200_000
"""Entries that are watched at most: to compare more would take longer than many a step."""

_CLOSED = sys.stdlib_module_names | {"numpy", "torch"}
"""Packages whose objects are not opened: loggers, locks and streams change whenever used."""

_OPEN = ("argparse", "collections", "torch.distributions", "types")
"""Modules of theirs whose objects are plain data."""

_FLAT_WEIGHTS = frozenset({"_flat_weights", "_flat_weight_refs"})
"""Attributes in which torch's recurrent layers list their parameters; new lists at each point."""

_STATES: tuple[tuple[type | tuple[type, ...], Callable[[Any], object]], ...] = (
    (torch.Generator, lambda x: bytes(x.get_state().numpy())),  # on the CPU for any device
    (random.Random, lambda x: x.getstate()),
    (np.random.Generator, lambda x: repr(x.bit_generator.state)),
    (np.random.RandomState, lambda x: repr(x.get_state())),
    ((bytearray, array), bytes),
)
"""Types with a state that is in no attribute, and how it is read."""

_Place = tuple[str, str]
"""(what holds it: a module or a class; the way from there, in Python's own words)."""

_PLAIN = frozenset({type(None), bool, int, float, str})
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class StateGuard:
    """State of a model at one time, to be compared with its state later.

    Comparing costs a few microseconds a module and one pass over the tensors; a GPU is waited for
    once, whatever there is to compare.

    Args:
        model: The model.
        skipped: Names of attributes of modules that are not watched.
        written: Tensors that are not watched, because the engine writes to them.
        with_parameters: True to watch the model's own parameters too. Most engines put each point
            in their place and do not read them.

    Raises:
        ConfigError: If it holds more than can be watched.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        skipped: Collection[str] = (),
        written: Iterable[Tensor] = (),
        with_parameters: bool = False,
    ) -> None:
        self._model = model
        self._skipped = frozenset(skipped)
        self._written = list(written)
        self._exact = with_parameters or bool(self._written)
        self._walk = self._walk_state()
        self._before = {place: _copy_leaf(x) for place, x in self._walk.leaves.items()}

    def check(self, named: Named = (), before: Iterable[Tensor] = ()) -> None:
        """Raise ConfigError if the model, or a tensor of `named`, holds other bits than before."""
        if what := self.find_change(named, before):
            raise ConfigError(f"model: {what} changes when the model is called. {_REMEDY}")

    def check_objects(self) -> None:
        """Check between two microbatches, where what returns by the end of the batch shows.

        Waits for no GPU as long as no object was replaced; numbers that are written into a tensor
        in place are compared by `check` alone.
        """
        if not self._walk.is_current():
            self.check()

    def find_change(self, named: Named = (), before: Iterable[Tensor] = ()) -> str | None:
        """Name what holds other bits than before; None if nothing does.

        Args:
            named: More tensors to compare in the same pass, such as the query's points. They have
                no attributes and no `grad`, and must have none now.
            before: Copies of their numbers, from before.
        """
        pairs = [(name, now, was) for (name, now), was in zip(named, before, strict=True)]
        for name, now, _ in pairs:
            if vars(now) or (now.is_leaf and now.grad is not None):
                return f"an attribute of {name}"
        if self._walk.is_current():
            return _find_difference(self._walk.moving, self._before, pairs)
        walk = self._walk_state()  # an object was replaced, perhaps by an equal one
        if places := walk.leaves.keys() ^ self._before.keys():
            return _format_place(min(places))
        found = _find_difference(walk.leaves, self._before, pairs)
        if found is None:
            self._walk = walk
        return found

    def difference(self, other: "StateGuard") -> str | None:
        """Name what `other`, the guard of a copy of the model, found otherwise; None if nothing."""
        if places := self._before.keys() ^ other._before.keys():
            return _format_place(min(places))
        return _find_difference(self._walk.leaves, other._before, [], copies=True)

    def _walk_state(self) -> "_Walk":
        return _Walk(self._model, self._skipped, self._written, exact=self._exact)


def check_stateless(model: nn.Module, spec: InputSpec) -> None:
    """Refuse a model that remembers what it is called on. It is called on copies of it alone.

    Args:
        model: As it was built: after a first call, an initialisation from data cannot be seen.
        spec: Inputs of one example.

    Raises:
        ConfigError: If its state depends on its first inputs, or changes in later calls.
        ValueError: If it cannot be called on a batch.
    """
    one, two = (deep_copy(model) for _ in range(2))
    for seed, module in enumerate((one, two)):
        inputs = draw_examples(module, 2, spec, seed)
        _call_twice(module, inputs)
    guard = StateGuard(one)
    if what := guard.difference(StateGuard(two)):
        raise ConfigError(
            f"model: {what} depends on the images that the model is called on. {_REMEDY}. What is "
            f"to be initialised from data must be so before, from public data"
        )
    for seed, (num, grad) in enumerate(((3, True), (5, False)), 2):
        point = perturb_parameters(one, torch.Generator().manual_seed(seed))
        before = [p.clone() for p in point.values()]
        inputs = draw_examples(one, num, spec, seed)
        with isolate_generators(device_of(inputs)):
            call_model(one, point, inputs, grad=grad)
        guard.check(((f"parameter {k!r}", p) for k, p in point.items()), before)


def warm_up(model: nn.Module, spec: InputSpec) -> None:
    """Call `model` on inputs of zeros, so that what it caches at a first call is there."""
    _call_twice(model, zero_inputs(spec, 2, next(model.parameters())))


def _call_twice(model: nn.Module, inputs_B: Inputs) -> None:
    """With autograd and without, at the model's own weights, and with draws of a fixed seed.

    Some models make layers at their first call, with weights that are drawn then.
    """
    with isolate_generators(device_of(inputs_B), seed=0):
        for grad in (True, False):
            point = {k: p.detach().clone() for k, p in model.named_parameters()}
            call_model(model, point, inputs_B, grad=grad)


def deep_copy(model: nn.Module) -> nn.Module:
    """Copy a model, to call it without a trace in the model itself.

    Raises:
        ConfigError: If it cannot be copied.
    """
    try:
        return copy.deepcopy(model)
    except (RuntimeError, NotImplementedError, TypeError) as e:
        raise ConfigError(
            f"model: it cannot be copied ({e}). A module that keeps a tensor computed from its "
            f"weights, as the old torch.nn.utils.weight_norm does, cannot be; those of "
            f"torch.nn.utils.parametrizations can"
        ) from e


class _Walk:
    """All that can be reached from a model, and where it is.

    Attributes:
        leaves: Place -> what is compared there: a tensor, an array, another object, or the class
            of an object that holds others.
        moving: Those of them whose numbers can change while they stay the same objects.
    """

    def __init__(
        self,
        model: nn.Module,
        skipped: frozenset[str],
        written: Iterable[Tensor],
        *,
        exact: bool,
    ) -> None:
        self.leaves: dict[_Place, object] = {}
        self.moving: dict[_Place, object] = {}
        self._mappings: list[tuple[Mapping[Any, object], tuple[object, ...], tuple[object, ...]]]
        self._mappings = []
        self._empty: list[Sized] = []  # as most of the dicts of hooks in a module are
        self._sequences: list[tuple[Collection[object], tuple[object, ...]]] = []
        self._slots: list[tuple[object, tuple[str, ...], tuple[object, ...]]] = []
        self._skipped = skipped
        self._written, self._exact = set(map(id, written)), exact
        self._names = {id(m): name for name, m in model.named_modules()}
        self._seen: set[int] = set()  # all of them kept alive by the three lists
        stack: list[tuple[_Place, object]] = [(("the model", ""), model)]
        while stack:
            stack.extend(reversed(self._visit(*stack.pop())))
            if len(self.leaves) > _MOST:
                raise ConfigError(
                    f"model: it holds more than {_MOST:,} entries in attributes and containers, "
                    f"too many to compare after every batch. Keep large tables in one tensor"
                )

    def is_current(self) -> bool:
        """False if an object was added, removed or replaced. Numbers in tensors are not read."""
        # len(), map() and is_ run in C: a few microseconds a module, against 50 for a new walk
        if any(map(len, self._empty)):
            return False
        for mapping, keys, values in self._mappings:
            if len(mapping) != len(keys) or not all(map(is_, mapping, keys)):
                return False
            if not all(map(is_, mapping.values(), values)):
                return False
        for sequence, items in self._sequences:
            if len(sequence) != len(items) or not all(map(is_, sequence, items)):
                return False
        return all(all(map(is_, _slot_values(x, names), items)) for x, names, items in self._slots)

    def _visit(self, place: _Place, x: object) -> list[tuple[_Place, object]]:
        """Note what is at `place`, and give what it holds."""
        if _is_plain(x):
            self.leaves[place] = x
            return []
        if id(x) in self._names:
            name = f"module {self._names[id(x)]!r}" if self._names[id(x)] else "the model"
            place = f"{name} ({type(x).__name__})", ""
        if id(x) in self._written:
            self.leaves[place] = type(x)
            return []
        if isinstance(x, Tensor | np.ndarray) or _find_reader(x):
            self.leaves[place] = self.moving[place] = x
            return list(self._inside(place, x))
        if id(x) in self._seen:
            self.leaves[place] = type(x)
            return []
        known = len(self._seen)
        inside = list(self._inside(place, x))
        self.leaves[place] = type(x) if len(self._seen) > known else x
        return inside

    def _inside(self, place: _Place, x: object) -> Iterator[tuple[_Place, object]]:
        """Yield an object's content, each with its place; `is_current` compares it from now on."""
        owner, path = place
        if isinstance(x, dict):
            self._note_mapping(x, x)
            for i, (key, value) in enumerate(dict.items(x)):
                shown = repr(key) if type(key) in _PLAIN else f"key {i}"
                yield (owner, f"{path}[{shown}]"), value
        elif isinstance(x, list | tuple | deque | set | frozenset):
            self._seen.add(id(x))
            if not isinstance(x, tuple | frozenset):
                self._sequences.append((x, tuple(x)))
            items = sorted(x, key=repr) if isinstance(x, set | frozenset) else x
            for i, value in enumerate(items):
                yield (owner, f"{path}[{i}]"), value
        if _has_watched_attributes(x):
            attributes = getattr(x, "__dict__", {})
            self._note_mapping(x, attributes)
            skipped = self._skipped_of(x)
            for name, value in attributes.items():
                if name == "_parameters" and id(x) in self._names and not self._exact:
                    # functional_call leaves a point's tensor in a module that has two names
                    self._mappings.append((value, tuple(value), ()))
                    yield (owner, "._parameters"), tuple(value)
                elif name not in skipped:
                    yield (owner, f"{path}.{name}"), value
            yield from self._slots_of(place, x)

    def _slots_of(self, place: _Place, x: object) -> Iterator[tuple[_Place, object]]:
        """Yield the content of the slots of an object and its classes."""
        owner, path = place
        for cls in filter(_is_foreign, type(x).__mro__):
            own = vars(cls)
            slots = tuple(k for k, v in own.items() if type(v) is MemberDescriptorType)
            values = _slot_values(x, slots)
            if slots:
                self._slots.append((x, slots, values))
            for name, value in zip(slots, values, strict=True):
                yield (owner, f"{path}.{name}"), value
            if id(cls) in self._seen:
                continue
            self._note_mapping(cls, own)
            for name, value in own.items():
                if not name.startswith("__") and type(value) is not MemberDescriptorType:
                    yield (f"class {cls.__module__}.{cls.__qualname__}", f".{name}"), value

    def _note_mapping(self, x: object, mapping: Mapping[Any, object]) -> None:
        self._seen.add(id(x))
        if mapping:
            self._mappings.append((mapping, tuple(mapping), tuple(mapping.values())))
        else:
            self._empty.append(mapping)

    def _skipped_of(self, x: object) -> frozenset[str]:
        if not isinstance(x, nn.Module):
            return frozenset()
        return self._skipped | _FLAT_WEIGHTS if isinstance(x, nn.RNNBase) else self._skipped


def _is_plain(x: object) -> bool:
    """True for what cannot change and holds nothing that can."""
    return type(x) in _PLAIN or (isinstance(x, tuple) and all(type(v) in _PLAIN for v in x))


def _format_place(place: _Place) -> str:
    """A place in words, up to the first container: keys in there might be private."""
    owner, path = place
    if found := re.match(r"\._(buffers|parameters|modules)\[(.+?)\]", path):
        return f"{found[1].removesuffix('s')} {found[2]} of {owner}"
    name = path.partition("[")[0].removeprefix(".")
    return f"attribute {name!r} of {owner}" if name else owner


def _has_watched_attributes(x: object) -> bool:
    """True if the attributes of an object are watched."""
    cls = type(x)
    if isinstance(x, nn.Module | Tensor):
        return True
    if isinstance(x, type | Enum):
        return False
    return _is_foreign(cls) or cls.__module__.startswith(_OPEN)


def _is_foreign(cls: type) -> bool:
    """True for a class that comes neither with Python nor with torch."""
    return cls.__module__.partition(".")[0] not in _CLOSED


def _slot_values(x: object, names: tuple[str, ...]) -> tuple[object, ...]:
    return tuple(getattr(x, name, None) for name in names)


def _find_reader(x: object) -> Callable[[Any], object] | None:
    return next((read for kind, read in _STATES if isinstance(x, kind)), None)


def _copy_leaf(x: object) -> object:
    """Copy of a leaf to compare with later."""
    if isinstance(x, Tensor):
        return x.detach().clone()
    if isinstance(x, np.ndarray):
        return x.copy()
    read = _find_reader(x)
    return x if read is None else read(x)


def _find_difference(
    leaves: Mapping[_Place, object],
    before: Mapping[_Place, object],
    pairs: list[tuple[str, Tensor, Tensor]],
    *,
    copies: bool = False,
) -> str | None:
    """Name the first leaf, or the first of `pairs`, that holds other bits than before."""
    for place, now in leaves.items():
        was = before[place]
        if isinstance(now, Tensor) and isinstance(was, Tensor):
            pairs.append((_format_place(place), now, was))
        elif not _is_unchanged(now, was, copies=copies):
            return _format_place(place)
    return _find_first_differing(pairs)


def _is_unchanged(now: object, was: object, *, copies: bool) -> bool:
    """True if an object that is no tensor is as it was.

    Args:
        now: The object.
        was: What `_copy_leaf` gave of it.
        copies: True if `was` is of a copy of the model, where an object of a class without `==`
            is another one.
    """
    if isinstance(now, np.ndarray):
        if not isinstance(was, np.ndarray) or (now.dtype, now.shape) != (was.dtype, was.shape):
            return False
        return now.tobytes() == was.tobytes()
    if read := _find_reader(now):
        return bool(read(now) == was)
    if now is was:
        return True
    if type(now) is not type(was):
        return False
    if isinstance(now, float | complex):
        return repr(now) == repr(was)  # NaN is like NaN, and 0.0 is not -0.0
    if isinstance(now, MethodType) and isinstance(was, MethodType):
        return now.__func__ is was.__func__ and (copies or now.__self__ is was.__self__)
    if copies and type(now).__eq__ is object.__eq__:
        return True
    try:
        return bool(now == was)
    except Exception:  # somebody else's `==`
        return False


def _find_first_differing(pairs: Iterable[tuple[str, Tensor, Tensor]]) -> str | None:
    """Name the first tensor that has not the bits it had; waits once for each device."""
    later: dict[tuple[torch.device, torch.dtype], list[tuple[str, Tensor, Tensor]]] = {}
    for name, now, was in pairs:
        differs = _differs(now, was)
        if differs is None:
            now, was = _bits(_unwrap(now)), _bits(was)
            later.setdefault((now.device, now.dtype), []).append((name, now, was))
        elif differs:
            return name
    flags: dict[torch.device, list[Tensor]] = {}
    for (device, _), group in later.items():  # in one line, and not with a kernel for each
        now_N, was_N = (torch.cat([_line(pair, i) for _, *pair in group]) for i in (0, 1))
        flags.setdefault(device, []).append((now_N != was_N).any())
    if any(
        (torch.stack(found).any() if found[1:] else found[0]).item() for found in flags.values()
    ):
        groups = (pair for group in later.values() for pair in group)
        return next(name for name, now, was in groups if not torch.equal(now, was))
    return None


def _line(pair: Sequence[Tensor], i: int) -> Tensor:
    """One of two tensors in a line, in the same order as the other would be."""
    same = pair[0].stride() == pair[1].stride()
    return in_memory_order(pair[i])[0] if same else pair[i].flatten()


def _differs(now: Tensor, was: Tensor) -> bool | None:
    """True if a bit differs; None if another device has to be waited for."""
    now = _unwrap(now)
    if torch._C._functorch.is_batchedtensor(now):
        return True  # it has a number for each example
    if (now.shape, now.dtype, now.device) != (was.shape, was.dtype, was.device):
        return True
    if now.is_meta:
        return False
    return not torch.equal(_bits(now), _bits(was)) if now.is_cpu else None


def _unwrap(x: Tensor) -> Tensor:
    """A tensor without the wrappers of grad; what vmap wraps stays wrapped."""
    # what a module keeps from within vmap and grad is wrapped; torch has no public way to look
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(x) and not functorch.is_batchedtensor(x):
        x = functorch.get_unwrapped(x)
    return x


def _bits(x: Tensor) -> Tensor:
    """The numbers of a tensor as integers, so that NaN is like NaN, and 0 is not -0."""
    x = x.detach() if x.requires_grad else x
    if x.layout is not torch.strided:
        x = x.to_dense()
    if x.is_quantized:
        return x.int_repr()
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    return x.resolve_neg().view(_INTEGERS[x.dtype.itemsize])
