"""CUDA devices that are not there: Python sees `cuda:0`, or several, and nothing runs on a GPU.

Two kinds of memory for tensors "on the GPU":

    numbers   The tensor lies on the CPU, and its storage is tagged with its card. Values are right,
              so data dependent code and the engine's own checks run. For small models, and for
              several cards.
    shapes    The tensor lies on torch's meta device: shapes and strides without values. A model of
              any size costs nothing.

A TorchFunctionMode answers `.device`, `.to(...)` and factories with `device=cuda`; a
TorchDispatchMode sees each aten operation below autograd and vmap, as the card would. Neither
FakeTensorMode("cuda") nor a tensor subclass gets through a backward pass: autograd asks the C++
device for its queue, and without a driver there is none.

Counted are kernel launches, places where the host waits for the device, copies, operations on
tensors of both devices (an error on a real card), and the peak of memory.
"""

import contextlib
import os
import sys
import threading
import weakref
from collections import Counter
from dataclasses import dataclass, field
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dpsweep.privacy.clip import zero
from dpsweep.privacy.engine.circulant import _count_bins
from dpsweep.privacy.engine.conv import _valid_pairs
from dpsweep.privacy.spectral import _torus_bins

GIB = 2**30

_PACKAGE = f"{os.sep}dpsweep{os.sep}"
_BLOCK = 512  # bytes; the caching allocator rounds every request up to it

_NO_KERNEL = """
    alias as_strided chunk conj _conj detach diagonal empty empty_like empty_strided expand
    is_same_size lift_fresh movedim _neg_view new_empty new_empty_strided permute real imag
    _reshape_alias resize_ resolve_conj resolve_neg select set_ slice split split_with_sizes
    squeeze sym_numel sym_size sym_storage_offset sym_stride t transpose unbind unfold unsqueeze
    _unsafe_view view view_as_complex view_as_real result_type
"""
_HOST_WAITS = """
    _local_scalar_dense equal is_nonzero masked_select nonzero _unique2 unique_consecutive
    unique_dim
"""
_UNORDERED = """
    index_add index_add_ scatter_add scatter_add_ scatter_reduce cumsum histc bincount
    embedding_dense_backward _adaptive_avg_pool2d_backward adaptive_max_pool2d_backward
    max_pool3d_with_indices_backward upsample_bilinear2d_backward upsample_bicubic2d_backward
    reflection_pad2d_backward replication_pad2d_backward nll_loss2d_forward
    grid_sampler_2d_backward
"""
"""Which torch lists, in `use_deterministic_algorithms`, as adding in any order on CUDA."""

_READS = (
    *(Tensor.tolist, Tensor.item, Tensor.__bool__, Tensor.__float__, Tensor.__int__),
    Tensor.__index__,
)
_COMPARES = (torch.equal, Tensor.equal, torch.allclose, Tensor.allclose)


@dataclass
class Ledger:
    """What was asked of the card.

    Attributes:
        launches: Kernel launches, by operation; a lower bound, as some operations launch several.
        waits: Places where the host waits for the device, by kind and line of dpsweep.
        copies: Direction -> bytes of each copy.
        mixed: Operations on tensors of both devices, which a real card refuses.
        unordered: Kernels that add floating-point numbers in an order of their own.
        double: Launches that compute in float64.
        helds, peaks: Bytes on each card now, and the most at any time.
        fractions: Share of each card's memory that the process was last held to.
        work: Launches on each card.
    """

    launches: Counter = field(default_factory=Counter)
    waits: Counter = field(default_factory=Counter)
    copies: dict = field(default_factory=lambda: {"up": [], "down": [], "across": []})
    mixed: list = field(default_factory=list)
    unordered: list = field(default_factory=list)
    double: int = 0
    helds: Counter = field(default_factory=Counter)
    peaks: Counter = field(default_factory=Counter)
    fractions: dict = field(default_factory=dict)
    work: Counter = field(default_factory=Counter)

    @property
    def held(self):
        return self.helds[0]

    @property
    def peak(self):
        return self.peaks[0]

    @property
    def fraction(self):
        return self.fractions.get(0)

    def restart(self):
        """Counts from here on; what lies on the card stays there."""
        self.launches.clear()
        self.waits.clear()
        self.copies = {"up": [], "down": [], "across": []}
        self.mixed.clear()
        self.unordered.clear()
        self.work.clear()
        self.double, self.peaks = 0, self.helds.copy()


@contextlib.contextmanager
def virtual_gpu(*, numbers=True, total=80 * GIB, num_cards=1):
    """Gives everything in this context that asks for CUDA the virtual cards; yields their ledger.

    Modes belong to one thread: those that dpsweep starts for each device enter them too, and others
    by the ledger's `enter_thread`.
    """
    assert numbers or num_cards == 1, "torch's meta device has no index"
    autocast = torch.autocast
    card = _Card(numbers, total)
    run = threading.Thread.run

    def run_with_cards(self):
        if not self.name.startswith("dpsweep-device"):
            return run(self)
        with card.ledger.enter_thread():
            return run(self)

    place = torch.cuda.memory

    def hold_to(share, device):
        # the real one, below the Python that checks the device's index, takes an int alone
        assert isinstance(device, int), device
        card.ledger.fractions[device] = share

    described = {"total_memory": total, "name": "virtual", "major": 9, "minor": 0}
    properties = type("Properties", (), described)
    stand_ins = [
        (torch.cuda, "_lazy_init", lambda: None),
        (place, "_lazy_init", lambda: None),
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "device_count", lambda: num_cards),
        (torch.cuda, "current_device", lambda: card.current),
        (torch.cuda, "_exchange_device", card.exchange),
        (torch.cuda, "_maybe_exchange_device", card.exchange),
        (threading.Thread, "run", run_with_cards),
        (torch, "autocast", lambda device_type, dtype: autocast("cpu", dtype)),
        (torch.cuda, "synchronize", lambda device=None: None),
        (torch.cuda, "get_device_name", lambda device=None: "virtual"),
        (torch.cuda, "_get_device_properties", lambda index: properties),
        (torch.cuda, "mem_get_info", lambda device=None: (total - card.held(device), total)),
        (torch.cuda, "memory_allocated", card.held),
        (torch.cuda, "memory_reserved", card.held),
        (torch.cuda, "max_memory_allocated", card.peak),
        (torch.cuda, "max_memory_reserved", card.peak),
        (torch.cuda, "reset_peak_memory_stats", lambda device=None: None),
        # no generator of a GPU's own: what is drawn on the card is drawn by the CPU's
        (torch.cuda, "get_rng_state", lambda device=None: torch.get_rng_state()),
        (torch.cuda, "set_rng_state", lambda state, device=None: None),
        (torch.cuda, "manual_seed_all", lambda seed: None),
        (torch._C, "_cuda_setMemoryFraction", hold_to),
        (torch.optim.Optimizer, "_accelerator_graph_capture_health_check", lambda self: None),
    ]
    with contextlib.ExitStack() as stack:
        for constant in (zero, _count_bins, _torus_bins, _valid_pairs):  # they lie on another card
            constant.cache_clear()
            stack.callback(constant.cache_clear)
        for owner, name, value in stand_ins:
            stack.enter_context(mock.patch.object(owner, name, value, create=True))
        deterministic = torch.backends.cudnn.deterministic
        stack.callback(setattr, torch.backends.cudnn, "deterministic", deterministic)
        stack.enter_context(_Operations(card))
        stack.enter_context(_Calls(card))
        yield card.ledger


def on_card(x):
    """Whether a tensor lies on the virtual card, outside its context too."""
    return x.is_meta or _storage(x) in _tagged


_pinned = weakref.WeakSet()
"""Storages of tensors in page-locked memory of the host: a copy of them need not be waited for."""

_tagged = weakref.WeakKeyDictionary()
"""Storages of tensors whose values lie on the CPU -> the index of the card that has them."""


class _Card:
    def __init__(self, numbers, total):
        self.numbers, self.total, self.ledger = numbers, total, Ledger()
        self.ledger.enter_thread = self.enter_thread
        self.known = weakref.WeakSet()
        self.lock = threading.RLock()  # of the ledger
        self.own = threading.local()  # of a thread: quiet, inside and current

    @contextlib.contextmanager
    def enter_thread(self):
        """Within it, this thread sees the cards too."""
        with _Operations(self), _Calls(self):
            yield

    @property
    def quiet(self):
        return getattr(self.own, "quiet", 0)

    @property
    def inside(self):
        """The card of a call with operands there, whose products lie there too; None outside."""
        return getattr(self.own, "inside", None)

    @property
    def current(self):
        return getattr(self.own, "current", 0)

    def exchange(self, index):
        before, self.own.current = self.current, index
        return before

    def index(self, device):
        """The index of a card as torch takes it: an int, a name or a device; None of a CPU."""
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if device.type != "cuda":
            return None
        return self.current if device.index is None else device.index

    def held(self, device=None):
        return self.ledger.helds[self.current if device is None else self.index(device)]

    def peak(self, device=None):
        return self.ledger.peaks[self.current if device is None else self.index(device)]

    @contextlib.contextmanager
    def silently(self):
        """Within it nothing is counted: what runs is the stand-in's own work."""
        self.own.quiet = self.quiet + 1
        try:
            yield
        finally:
            self.own.quiet -= 1

    def holds(self, x):
        return self.place(x) is not None

    def place(self, x):
        """The index of the card where a tensor lies; None on the host."""
        if self.numbers:
            return _tagged.get(_storage(x))
        with torch._C.DisableTorchFunction():
            return 0 if bare(x).is_meta else None

    def put(self, x, index):
        """Tags a tensor that was made on a card, and counts its memory."""
        storage = _storage(x)
        if self.numbers:
            _tagged[storage] = index
        if storage in self.known:
            return
        size = -(-storage.nbytes() // _BLOCK) * _BLOCK
        with self.lock:
            ledger = self.ledger
            self.known.add(storage)
            ledger.helds[index] += size
            ledger.peaks[index] = max(ledger.peaks[index], ledger.helds[index])
        weakref.finalize(storage, self.freed, size, index).atexit = False

    def freed(self, size, index):
        with self.lock:
            self.ledger.helds[index] -= size

    def take(self, x):
        """Says that a tensor lies on the host."""
        if self.numbers:
            _tagged.pop(_storage(x), None)
        return x

    def waited(self, kind):
        if not self.quiet:
            with self.lock:
                self.ledger.waits[f"{kind} at {_line()}"] += 1

    def upload(self, x, dtype, index, *, waits, **layout):
        self._copied("across" if self.holds(x) else "up", x)
        if waits:
            self.waited("copy to the device")
        with self.silently():
            if self.numbers:
                made = x.to(dtype=dtype or x.dtype, copy=True, **layout)
            else:
                made = x.to(device="meta", dtype=dtype, **layout)
            self.put(made, index)
        return made

    def download(self, x, dtype, **layout):
        self._copied("down", x)
        self.waited("copy to the host")
        with self.silently():
            if self.numbers:
                return self.take(x.to(dtype=dtype or x.dtype, copy=True, **layout))
            return torch.zeros(x.shape, dtype=dtype or x.dtype, device="cpu")

    def _copied(self, way, x):
        if not self.quiet:
            with self.lock:
                self.ledger.copies[way].append(x.numel() * x.element_size())


def bare(x):
    """The tensor below functorch's wrappers."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(x):
        x = functorch.get_unwrapped(x)
    return x


def _storage(x):
    with torch._C.DisableTorchFunction():
        return bare(x).untyped_storage()


def _line():
    """The innermost line of dpsweep on the stack."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if _PACKAGE in name and f"{os.sep}tests{os.sep}" not in name:
            return f"{name.rpartition(_PACKAGE)[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return "?"


def _kernels(name, args):
    """Of an operation: one, or for lists that no kernel takes together one for each tensor."""
    lists = [x for x in args if isinstance(x, list | tuple) and all(map(torch.is_tensor, x))]
    if not name.startswith("_foreach_") or not lists:
        return 1
    alike = len({x.dtype for some in lists for x in some}) == 1
    together = zip(*lists, strict=True)
    alike = alike and all(len({x.stride() for x in same}) == 1 for same in together)
    return 1 if alike else len(lists[0])


def _is_cuda(device):
    return isinstance(device, int) or torch.device(device).type == "cuda"


class _Calls(TorchFunctionMode):
    """What Python sees."""

    def __init__(self, card):
        super().__init__()
        self.card = card

    def __torch_function__(self, func, types, args=(), kwargs=None):
        card, kwargs = self.card, dict(kwargs or {})
        if func in _GETTERS:
            return _GETTERS[func](card, args[0], func)
        if func is Tensor.pin_memory or kwargs.pop("pin_memory", False):
            made = args[0].clone() if func is Tensor.pin_memory else func(*args, **kwargs)
            _pinned.add(_storage(made))
            return made
        if func in (Tensor.to, Tensor.cuda, Tensor.cpu):
            return self._move(func, args, kwargs)
        if func in (Tensor.numpy, Tensor.__array__) and card.holds(args[0]):
            raise TypeError("can't convert cuda device type tensor to numpy")
        if func in _READS or func in _COMPARES:
            return self._read(func, args, kwargs)
        if kwargs.get("device") is not None and _is_cuda(kwargs["device"]):
            return self._make(func, args, kwargs)
        if not card.numbers:
            return func(*args, **kwargs)
        given = (x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))
        here = next((i for i in map(card.place, given) if i is not None), None)
        return self._within(here, func, args, kwargs)

    def _within(self, here, func, args, kwargs):
        """Calls `func`; what it makes of no tensor at all lies on the card `here`, if any."""
        own = self.card.own
        before = self.card.inside
        own.inside = before if here is None else here
        try:
            return func(*args, **kwargs)
        finally:
            own.inside = before

    def _make(self, func, args, kwargs):
        index = self.card.index(kwargs["device"])
        if func in (torch.tensor, torch.as_tensor):  # made on the host, then copied
            made = func(*args, **{**kwargs, "device": "cpu"})
            return self.card.upload(made, None, index, waits=True)
        kwargs["device"] = "cpu" if self.card.numbers else "meta"
        return self._within(index, func, args, kwargs)

    def _read(self, func, args, kwargs):
        card, x = self.card, args[0]
        if not card.holds(x):
            return func(*args, **kwargs)
        card.waited(func.__name__)
        with card.silently():
            if card.numbers:
                return func(*args, **kwargs)
            if func in _COMPARES:
                return True
            if func is Tensor.__bool__:
                return False
            fill = torch.zeros if x.dtype == torch.bool else torch.ones
            return func(fill(x.shape, dtype=x.dtype))

    def _move(self, func, args, kwargs):
        card, x = self.card, args[0]
        device, dtype, waits, other = kwargs.get("device"), kwargs.get("dtype"), True, None
        waits = not (kwargs.get("non_blocking", False) and _storage(x) in _pinned)
        for value in (*args[1:], kwargs.get("other")):
            if isinstance(value, Tensor):
                other = value
            elif isinstance(value, torch.dtype):
                dtype = value
            elif isinstance(value, str | torch.device):
                device = value
        if func is Tensor.cuda:
            device = "cuda"
        elif func is Tensor.cpu:
            device = "cpu"
        elif other is not None:
            device, dtype = (card.place(other) if card.holds(other) else "cpu"), other.dtype
        kept = ("memory_format", "copy")
        layout = {k: kwargs[k] for k in kept if kwargs.get(k) is not None}
        if str(device) == "meta":
            return x.to(device="meta", dtype=dtype)
        here, dtype = card.place(x), dtype or x.dtype
        there = here if device is None else card.index(device)
        layout_only = {k: v for k, v in layout.items() if k != "copy"}
        if here == there:
            return x.to(dtype=dtype, **layout)
        if there is None:
            return card.download(x, dtype, **layout_only)
        waits = waits and here is None  # the host does not wait for a copy between cards
        return card.upload(x, dtype, there, waits=waits, **layout_only)


_GETTERS = {
    Tensor.device.__get__: lambda card, x, get: (
        torch.device("cuda", card.place(x)) if card.holds(x) else get(x)
    ),
    Tensor.is_cuda.__get__: lambda card, x, get: card.holds(x),
    Tensor.is_cpu.__get__: lambda card, x, get: not card.holds(x) and get(x),
    Tensor.is_meta.__get__: lambda card, x, get: not card.holds(x) and get(x),
}


class _Operations(TorchDispatchMode):
    """What the card sees."""

    def __init__(self, card):
        super().__init__()
        self.card = card

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        card, kwargs = self.card, kwargs or {}
        name = func.overloadpacket._qualified_op_name.split("::")[-1]
        ins = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        here = sorted((x for x in ins if card.holds(x)), key=lambda x: not x.dim())
        index = card.place(here[0]) if here else card.inside
        loud = not card.quiet
        if loud and here:
            with card.lock:
                self._look(name, ins, here, args)
        out = self._compute(func, name, args, kwargs, ins)
        outs = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        made_here = bool(here) or (card.numbers and not ins and index is not None)
        if not card.numbers:
            made_here = made_here or any(card.holds(x) for x in outs)
            index = 0
        old = {_storage(x) for x in ins}
        for x in outs:
            if made_here and (card.numbers or card.holds(x)):
                card.put(x, index)
            elif _storage(x) not in old:
                card.take(x)
        if loud and made_here and name not in _NO_KERNEL.split():
            wide = (torch.float64, torch.complex128)
            with card.lock:
                card.ledger.launches[name] += _kernels(name, args)
                card.ledger.work[index] += 1
                card.ledger.double += any(x.dtype in wide for x in (*ins, *outs) if x.dim())
        return out

    def _look(self, name, ins, here, args):
        """Notes operations that a card refuses, and those that the host waits for."""
        card = self.card
        main = card.place(here[0])
        away = [x for x in ins if (x.dim() or card.holds(x)) and card.place(x) != main]
        if away and name not in ("copy_", "_to_copy"):
            shapes = [[(card.place(x), *x.shape) for x in some] for some in (here, away)]
            card.ledger.mixed.append(f"{name} at {_line()}: {shapes[0]} and {shapes[1]}")
        once = name == "scatter_add" and args[2].shape[args[1]] == 1  # nothing is added twice
        if name in _UNORDERED.split() and here[0].is_floating_point() and not once:
            card.ledger.unordered.append(f"{name} at {_line()}")
        if name in _HOST_WAITS.split():
            card.waited(name)
        if name == "copy_" and card.holds(args[0]) != card.holds(args[1]):
            card.waited("copy_ across devices")

    def _compute(self, func, name, args, kwargs, ins):
        if self.card.numbers or not any(self.card.holds(x) for x in ins):
            return func(*args, **kwargs)
        if name == "_local_scalar_dense":  # meta tensors have no values to give
            return False if ins[0].dtype == torch.bool else 1
        if name == "equal":
            return True
        if name == "copy_":
            return args[0] if self.card.holds(args[0]) else args[0].zero_()
        return func(*args, **kwargs)
